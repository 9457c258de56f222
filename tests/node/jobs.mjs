// Responses in the background.

import assert from "node:assert/strict";
import { all, ended, refused, SKY, VERDICT, WEATHER, withFault } from "./support.mjs";

const ask = { model: "gemma-4", input: SKY, background: true };
const short = { ...ask, max_output_tokens: 40 };
const endless = { ...ask, max_output_tokens: 20_000, ignore_eos: true };
const gone = { status: 404, code: "response_not_found", type: "invalid_request_error" };

export async function oneIsHandedOverAndFetched({ client }) {
  const job = await client.responses.create({ ...short, metadata: { ticket: "7" } });
  assert.match(job.id, /^resp_/);
  assert.equal(job.background, true);
  assert.ok(["queued", "in_progress"].includes(job.status));
  const done = await ended(client, job.id);

  assert.equal(done.status, "incomplete");
  assert.ok(done.output_text.length > 0);
  assert.equal(done.usage.output_tokens, 40);
  assert.deepEqual(done.metadata, { ticket: "7" });
  const { data, response, request_id } = await client.responses.retrieve(job.id).withResponse();
  assert.deepEqual(data, done);
  assert.match(request_id, /^req-/);
  assert.equal(response.headers.get("retry-after"), null);
}

export async function oneThatIsPendingSaysWhenToComeBack({ client }) {
  const job = await client.responses.create(endless);
  const { response } = await client.responses.retrieve(job.id).withResponse();

  assert.match(response.headers.get("retry-after"), /^[1-5]?[0-9]$/);
  await client.responses.cancel(job.id);
}

export async function aStreamIsLeftAndTakenUpAgain({ client }) {
  const first = [];
  for await (const event of await client.responses.create({ ...short, stream: true })) {
    first.push(event);
    if (event.type === "response.output_text.delta") break;
  }
  const id = first[0].response.id;
  const rest = await all(
    client.responses.retrieve(id, { stream: true, starting_after: first.at(-1).sequence_number }));
  const whole = await all(client.responses.retrieve(id, { stream: true }));

  assert.deepEqual(first.slice(0, 3).map((event) => event.type),
    ["response.created", "response.queued", "response.in_progress"]);
  assert.deepEqual(whole.map((event) => event.sequence_number), whole.map((_, index) => index));
  assert.deepEqual([...first, ...rest], whole);
  assert.equal(whole.at(-1).type, "response.incomplete");
  const deltas = whole.filter((event) => event.type === "response.output_text.delta");
  assert.equal(deltas.map((event) => event.delta).join(""), (await client.responses.retrieve(id)).output_text);
}

export async function theStreamHelperHandsOver({ client }) {
  const done = await client.responses.stream(short).finalResponse();

  assert.equal(done.status, "incomplete");
  assert.equal(done.output_text, (await client.responses.retrieve(done.id)).output_text);
}

export async function theStreamHelperTakesUp({ client }) {
  const job = await client.responses.create(short);
  const events = [];
  const stream = client.responses.stream({ response_id: job.id, starting_after: 4 });
  for await (const event of stream) events.push(event);
  const done = await stream.finalResponse();

  assert.equal(events[0].sequence_number, 5);
  assert.equal(done.output_text, (await client.responses.retrieve(job.id)).output_text);
}

export async function whatIsSaidAnewReplacesTheOld({ client, site }) {
  const format = { type: "json_schema", ...VERDICT };
  const asked = [
    { text: { format } },
    { text: { format }, max_output_tokens: 8 },
    { reasoning: { effort: "high" } },
    { input: "Call get_weather for Paris.", tools: [{ type: "function", strict: false, ...WEATHER }],
      tool_choice: "required" },
  ];
  const streams = await withFault(site, { fault: "die_mid_stream", after_chunks: 3 }, async () => {
    const begun = asked.map((fields) => client.responses.stream({ ...ask, ...fields }));
    await Promise.all(begun.map((stream) => stream.emitted("response.output_item.added")));
    return begun; // what has begun breaks off; what follows does not
  });
  for (const [place, stream] of streams.entries()) {
    const done = await stream.finalResponse();
    const events = await all(client.responses.retrieve(done.id, { stream: true }));
    const items = (type) => events.filter((event) => event.type === type).map((event) => event.item);
    const added = items("response.output_item.added");
    const isVoid = (item) => !done.output.some((one) => one.id === item.id);

    assert.ok(added.some(isVoid), `nothing was void: ${JSON.stringify(asked[place])}`);
    assert.deepEqual(items("response.output_item.done").map((item) => item.id), added.map((item) => item.id));
    for (const item of items("response.output_item.done").filter(isVoid)) assert.equal(item.status, "incomplete");
    assert.equal(done.status, asked[place].max_output_tokens ? "incomplete" : "completed");
    assert.deepEqual(await client.responses.retrieve(done.id).then((kept) => kept.output.map((item) => item.id)),
      done.output.map((item) => item.id));
  }
}

export async function oneIsCancelledForGood({ client }) {
  const job = await client.responses.create(endless);
  const cancelled = await client.responses.cancel(job.id);
  const again = await client.responses.cancel(job.id);
  const events = await all(client.responses.retrieve(job.id, { stream: true }));
  const helped = await client.responses.stream({ response_id: job.id }).finalResponse();

  assert.deepEqual([cancelled.status, again.status, helped.status], ["cancelled", "cancelled", "cancelled"]);
  assert.equal(cancelled.id, job.id);
  assert.equal(events.at(-1).response.status, "cancelled");
}

export async function whoFollowsSeesTheCancellation({ client }) {
  const stream = client.responses.stream(endless);
  const { response } = await stream.emitted("response.created");
  await stream.emitted("response.output_text.delta");
  await client.responses.cancel(response.id);

  assert.equal((await stream.finalResponse()).status, "cancelled");
}

export async function oneIsForgottenInTheMiddle({ client, sdk }) {
  const job = await client.responses.create(endless);

  assert.deepEqual(await client.responses.delete(job.id), { id: job.id, object: "response", deleted: true });
  for (const request of [() => client.responses.retrieve(job.id), () => client.responses.delete(job.id),
    () => client.responses.cancel(job.id), () => client.responses.retrieve(job.id, { stream: true })])
    await refused(request, sdk.NotFoundError, gone);
}

export async function anotherKeysIsNotThere({ client, other, sdk }) {
  const { id } = await client.responses.create(short);

  for (const request of [() => other.responses.retrieve(id), () => other.responses.cancel(id),
    () => other.responses.delete(id), () => other.responses.retrieve(id, { stream: true }),
    () => all(other.responses.inputItems.list(id)), () => other.responses.stream({ response_id: id }).finalResponse(),
    () => other.responses.create({ ...short, previous_response_id: id })])
    await refused(request, sdk.NotFoundError, gone);
  assert.equal((await ended(client, id)).status, "incomplete");
}

export async function aConversationGoesOn({ client, sdk }) {
  const pending = await client.responses.create(endless);
  await refused(() => client.responses.create({ ...ask, background: false, previous_response_id: pending.id }),
    sdk.BadRequestError, { status: 400, code: "response_not_finished", param: "previous_response_id" });
  await client.responses.cancel(pending.id);
  const job = await client.responses.create(short);
  await ended(client, job.id);
  const next = await client.responses.create({ ...short, previous_response_id: job.id });
  const done = await ended(client, next.id);

  assert.equal(done.previous_response_id, job.id);
  assert.deepEqual((await all(client.responses.inputItems.list(next.id, { order: "asc" }))).map((item) => item.role),
    ["user", "assistant", "user"]);
}

export async function theSameIdempotencyKeyIsTheSameJob({ client, other, sdk }) {
  const headers = { "Idempotency-Key": crypto.randomUUID() };
  const one = await client.responses.create(short, { headers });
  const same = await client.responses.create(short, { headers });
  const theirs = await other.responses.create(short, { headers });

  assert.equal(same.id, one.id);
  assert.notEqual(theirs.id, one.id);
  await refused(() => client.responses.create({ ...short, input: "Something else" }, { headers }),
    sdk.UnprocessableEntityError, { status: 422, code: "idempotency_key_reused", type: "invalid_request_error" });
}

export async function whatCanNeverRunIsRefusedAtOnce({ client, sdk }) {
  for (const [fields, headers, kind, code] of [
    [{ model: "gpt-5" }, {}, sdk.NotFoundError, "model_not_found"],
    [{ input: "word ".repeat(60_000) }, {}, sdk.BadRequestError, "context_length_exceeded"],
    [{}, { "x-gateway-priority": "urgent" }, sdk.BadRequestError, "invalid_request"],
    [{}, { "x-gateway-expires-s": "soon" }, sdk.BadRequestError, "invalid_request"],
  ])
    for (const stream of [false, true])
      await refused(() => client.responses.create({ ...short, stream, ...fields }, { headers }), kind, { code });
}
