// Requests that are asked again, with the same Idempotency-Key.

import assert from "node:assert/strict";
import { all, refused, SKY } from "./support.mjs";

const messages = [{ role: "user", content: SKY }];
const keyed = () => ({ headers: { "Idempotency-Key": crypto.randomUUID() } });

export async function aChatIsAnsweredAgain({ client, other, model, sdk }) {
  const fields = { model, messages, max_tokens: 20 };
  const options = keyed();
  const first = await client.chat.completions.create(fields, options).withResponse();
  const again = await client.chat.completions.create(fields, options).withResponse();
  const theirs = await other.chat.completions.create(fields, options);

  assert.deepEqual(again.data.choices, first.data.choices);
  assert.equal(again.data.id, first.data.id);
  assert.equal(again.response.headers.get("x-gateway-replayed"), "true");
  assert.equal(again.response.headers.get("x-gateway-original-request-id"), first.request_id);
  assert.notEqual(again.request_id, first.request_id);
  assert.notEqual(theirs.id, first.data.id);
  await refused(() => client.chat.completions.create({ ...fields, max_tokens: 21 }, options),
    sdk.UnprocessableEntityError, { status: 422, code: "idempotency_key_reused", type: "invalid_request_error" });
}

export async function aStreamIsStreamedAgain({ client, model }) {
  const options = keyed();
  const ask = () => all(client.chat.completions.create({ model, messages, max_tokens: 20, stream: true }, options));

  assert.deepEqual(await ask(), await ask());
}

export async function aResponseIsAnsweredAgain({ client, model }) {
  const options = keyed();
  const ask = () => client.responses.create({ model, input: SKY, max_output_tokens: 20 }, options);
  const [first, again] = [await ask(), await ask()];

  assert.deepEqual({ ...again, _request_id: null }, { ...first, _request_id: null });
}

export async function oneThatRunsIsToBeAskedForLater({ client, model, sdk }) {
  const options = keyed();
  const fields = { model, messages, max_tokens: 20_000, stream: true, ignore_eos: true };
  const stream = await client.chat.completions.create(fields, options);
  for await (const _ of stream) {
    await refused(() => client.chat.completions.create(fields, options), sdk.ConflictError,
      { status: 409, code: "idempotency_in_progress", type: "conflict" });
    break;
  }
}

export async function whoAsksTooEarlyIsAnsweredLater({ connect, model }) {
  const patient = connect("a", { maxRetries: 5 });
  const options = keyed();
  const ask = () => patient.chat.completions.create({ model, messages, max_tokens: 400, ignore_eos: true }, options);
  const [one, other] = await Promise.all([ask(), ask()]);

  assert.equal(other.id, one.id);
  assert.deepEqual(other.choices, one.choices);
}
