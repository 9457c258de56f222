// Chats that are jobs: because their caller says so, or because their class does.

import assert from "node:assert/strict";
import { all, ended, refused, SKY } from "./support.mjs";

const ask = { model: "gemma-4", messages: [{ role: "user", content: SKY }], max_tokens: 40 };
const prefer = (preference) => ({ headers: { Prefer: preference } });
const nameOf = (job) => job.replace("resp_", "chatcmpl-");

export async function oneIsHandedOverAndFetchedInBothForms({ client }) {
  const { data, response } = await client.chat.completions.create(ask, prefer("respond-async")).withResponse();
  assert.equal(response.status, 202);
  assert.equal(response.headers.get("location"), `/v1/responses/${data.id}`);
  assert.equal(response.headers.get("preference-applied"), "respond-async");
  assert.deepEqual([data.object, data.background], ["response", true]);
  const done = await ended(client, data.id);
  const completion = await client.chat.completions.retrieve(nameOf(data.id));

  assert.equal(completion.object, "chat.completion");
  assert.equal(completion.choices[0].message.content, done.output_text);
  assert.equal(completion.usage.completion_tokens, done.usage.output_tokens);
}

export async function oneThatEndsInTimeIsAnsweredAsEver({ client }) {
  const { data, response } = await client.chat.completions.create(ask, prefer("respond-async, wait=20")).withResponse();

  assert.equal(response.status, 200);
  assert.equal(response.headers.get("preference-applied"), "respond-async, wait=20");
  assert.ok(data.choices[0].message.content.length > 0);
  assert.deepEqual((await client.chat.completions.retrieve(data.id)).choices, data.choices);
}

export async function oneThatIsPendingIsNotThereYet({ client, other, sdk }) {
  const { id } = await client.chat.completions.create(
    { ...ask, max_tokens: 20_000, ignore_eos: true }, prefer("respond-async"));

  await refused(() => client.chat.completions.retrieve(nameOf(id)), sdk.ConflictError,
    { status: 409, code: "completion_not_finished" });
  await refused(() => other.chat.completions.retrieve(nameOf(id)), sdk.NotFoundError,
    { status: 404, code: "response_not_found" });
  assert.equal((await client.responses.cancel(id)).status, "cancelled");
  await refused(() => client.chat.completions.retrieve(nameOf(id)), sdk.APIError,
    { status: 410, code: "job_cancelled" });
}

export async function aStreamIsServedLive({ client }) {
  const chunks = await all(client.chat.completions.create({ ...ask, stream: true }, prefer("respond-async")));

  assert.equal(chunks.at(-1).choices[0].finish_reason, "length");
}

export async function oneThroughTheQueueIsAChatAsAnyOther({ client }) {
  const fields = { ...ask, model: "queued" };
  const { data, response } = await client.chat.completions.create(fields).withResponse();
  const stream = client.chat.completions.stream({ ...fields, stream_options: { include_usage: true } });
  const completion = await stream.finalChatCompletion();

  assert.equal(response.status, 200);
  assert.equal(nameOf(response.headers.get("x-gateway-job")), data.id);
  assert.equal(completion.choices[0].finish_reason, data.choices[0].finish_reason);
  assert.ok(completion.choices[0].message.content.length > 0);
  assert.equal((await stream.totalUsage()).completion_tokens, data.usage.completion_tokens);
  assert.equal((await client.chat.completions.retrieve(completion.id)).choices[0].message.content,
    completion.choices[0].message.content);
}
