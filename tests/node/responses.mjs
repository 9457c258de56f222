// Responses that are answered in place.

import assert from "node:assert/strict";
import { all, listening, LONG, refused, SKY, VERDICT, WEATHER, withFault } from "./support.mjs";

const ask = { model: "gemma-4", input: SKY };
const tools = [{ type: "function", strict: false, ...WEATHER }];
const call = { model: "gemma-4", input: "Call get_weather for Paris.", tools, tool_choice: "required" };

export async function aResponseIsAnswered({ client }) {
  const response = await client.responses.create({ ...ask, max_output_tokens: 20, metadata: { ticket: "7" } });

  assert.match(response.id, /^resp_/);
  assert.equal(response.object, "response");
  assert.equal(response.status, "incomplete");
  assert.equal(response.incomplete_details.reason, "max_output_tokens");
  assert.ok(response.output_text.length > 0);
  assert.equal(response.usage.output_tokens, 20);
  assert.deepEqual(response.metadata, { ticket: "7" });
  assert.match(response._request_id, /^req-/);
}

export async function aStreamSaysWhatTheWholeAnswerSays({ client }) {
  const whole = await client.responses.create(ask);
  const events = await all(client.responses.create({ ...ask, stream: true }));

  assert.deepEqual(events.map((event) => event.sequence_number), events.map((_, index) => index));
  assert.deepEqual(events.slice(0, 2).map((event) => event.type), ["response.created", "response.in_progress"]);
  assert.equal(events.at(-1).type, "response.completed");
  const deltas = events.filter((event) => event.type === "response.output_text.delta");
  assert.equal(deltas.map((event) => event.delta).join(""), whole.output_text);
}

export async function theStreamHelperFollows({ client }) {
  for (const fields of [ask, { ...ask, max_output_tokens: 9 }, { ...ask, reasoning: { effort: "low" } }, call]) {
    const stream = client.responses.stream(fields);
    const types = [];
    for await (const event of stream) types.push(event.type);
    const final = await stream.finalResponse();
    const kept = await client.responses.retrieve(final.id);

    assert.ok(types.length > 5);
    assert.equal(types.at(-1), `response.${final.status}`);
    assert.equal(final.output_text, kept.output_text);
    assert.deepEqual(final.output.map((item) => item.id), kept.output.map((item) => item.id));
  }
}

export async function aThoughtIsAnItemOfItsOwn({ client }) {
  const response = await client.responses.create({ ...ask, reasoning: { effort: "high" } });

  assert.deepEqual(response.output.map((item) => item.type), ["reasoning", "message"]);
  assert.ok(response.output[0].content[0].text.length > 0);
  assert.ok(response.usage.output_tokens_details.reasoning_tokens > 0);
}

export async function aFormIsKept({ client }) {
  const text = { format: { type: "json_schema", ...VERDICT } };
  const parsed = await client.responses.parse({ ...ask, text });
  const streamed = await client.responses.stream({ ...ask, text }).finalResponse();

  assert.equal(typeof parsed.output_parsed.score, "number");
  assert.deepEqual(JSON.parse(streamed.output_text), parsed.output_parsed);
}

export async function aFunctionIsCalledAndItsResultTaken({ client }) {
  const asked = await client.responses.create(call);
  const made = asked.output.at(-1);
  const told = await client.responses.create({ model: "gemma-4", tools, previous_response_id: asked.id,
    input: [{ type: "function_call_output", call_id: made.call_id, output: "Rain." }] });
  const items = await all(client.responses.inputItems.list(told.id, { limit: 1 }));

  assert.equal(made.name, "get_weather");
  assert.equal(typeof JSON.parse(made.arguments).city, "string");
  assert.ok(told.output_text.length > 0);
  assert.deepEqual(items.map((item) => item.type), ["function_call_output", "function_call", "message"]);
}

export async function aConversationGoesOn({ client }) {
  const first = await client.responses.create(ask);
  const second = await client.responses.create(
    { model: "gemma-4", previous_response_id: first.id, input: "And at night?" });
  const byHand = await client.responses.create({ model: "gemma-4", store: false,
    input: [{ role: "user", content: SKY }, ...first.output, { role: "user", content: "And at night?" }] });

  assert.equal(second.previous_response_id, first.id);
  assert.equal(second.output_text, byHand.output_text);
  assert.ok(second.usage.input_tokens > first.usage.input_tokens + first.usage.output_tokens);
}

export async function oneIsFetchedAndForgotten({ client, other, sdk }) {
  const response = await client.responses.create({ ...ask, max_output_tokens: 5 });
  const gone = { status: 404, code: "response_not_found", type: "invalid_request_error" };

  assert.deepEqual(await client.responses.retrieve(response.id), response);
  for (const request of [() => other.responses.retrieve(response.id), () => other.responses.delete(response.id),
    () => other.responses.create({ ...ask, previous_response_id: response.id })])
    await refused(request, sdk.NotFoundError, gone);
  assert.deepEqual(await client.responses.delete(response.id),
    { id: response.id, object: "response", deleted: true });
  await refused(() => client.responses.retrieve(response.id), sdk.NotFoundError, gone);
  await refused(() => client.responses.delete(response.id), sdk.NotFoundError, gone);
}

export async function oneInPlaceIsNoJob({ client, sdk }) {
  const { id } = await client.responses.create({ ...ask, max_output_tokens: 5 });

  await refused(() => client.responses.cancel(id), sdk.BadRequestError, { status: 400, code: "not_in_background" });
  await refused(() => client.responses.retrieve(id, { stream: true }), sdk.BadRequestError,
    { status: 400, code: "unsupported_parameter", param: "stream" });
}

export async function whatIsWrongIsRefused({ client, sdk }) {
  for (const [fields, kind, members] of [
    [{ model: "gpt-5" }, sdk.NotFoundError, { status: 404, code: "model_not_found", param: "model" }],
    [{ input: [] }, sdk.BadRequestError, { status: 400, code: "invalid_request", param: "input" }],
    [{ temperature: -3 }, sdk.BadRequestError, { status: 400, code: "invalid_request", param: "temperature" }],
    [{ tools: [{ type: "web_search" }] }, sdk.BadRequestError,
      { status: 400, code: "unsupported_parameter", param: "tools.0.type" }],
    [{ previous_response_id: "resp_1" }, sdk.NotFoundError,
      { status: 404, code: "response_not_found", param: "previous_response_id" }],
  ])
    for (const stream of [false, true])
      await refused(() => client.responses.create({ ...ask, stream, ...fields }), kind,
        { type: "invalid_request_error", ...members });
}

export async function aStreamThatBreaksIsAResponseThatFailed({ client, sdk, site }) {
  const fields = { ...ask, max_output_tokens: 200, ignore_eos: true };
  const kinds = [];
  let id;
  const thrown = await withFault(site, { fault: "die_mid_stream", after_chunks: 5 }, async () => [
    await (async () => {
      for await (const event of await client.responses.create({ ...fields, stream: true })) {
        kinds.push(event.type);
        id ??= event.response.id;
      }
    })().catch((error) => error),
    await client.responses.stream(fields).finalResponse().catch((error) => error)]);

  for (const error of thrown) {
    assert.ok(error instanceof sdk.APIError);
    assert.equal(error.code, "server_error");
  }
  assert.equal(kinds.at(-1), "response.output_text.delta");
  const failed = await client.responses.retrieve(id);
  assert.equal(failed.status, "failed");
  assert.equal(failed.error.code, "server_error");
  assert.equal(failed.output[0].status, "incomplete");
}

export async function commentsPassUnseen({ connect }) {
  const heard = [];
  const client = connect("a", { fetch: listening(heard) });
  const final = await client.responses.stream({ model: "patient", input: LONG, max_output_tokens: 5 })
    .finalResponse();

  assert.match(await heard[0], /^: keep-alive$/m);
  assert.equal(final.status, "incomplete");
}
