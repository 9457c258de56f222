// Chats, completions and models.

import assert from "node:assert/strict";
import { all, listening, LONG, refused, SKY, VERDICT, WEATHER, withFault } from "./support.mjs";

const messages = [{ role: "user", content: SKY }];
const call = { messages: [{ role: "user", content: "Call get_weather for Paris." }],
  tools: [{ type: "function", function: WEATHER }], tool_choice: "required" };

export async function aChatIsAnswered({ client, model }) {
  const { data, response, request_id } = await client.chat.completions.create({ model, messages, max_tokens: 20 })
    .withResponse();

  assert.equal(data.object, "chat.completion");
  assert.equal(data.model, model);
  assert.equal(data.choices[0].message.role, "assistant");
  assert.ok(data.choices[0].message.content.length > 0);
  assert.equal(data.choices[0].finish_reason, "length");
  assert.equal(data.usage.completion_tokens, 20);
  assert.equal(data.usage.total_tokens, data.usage.prompt_tokens + 20);
  assert.equal(data._request_id, request_id);
  assert.equal(data.id, `chatcmpl-${request_id}`);
  assert.equal(response.headers.get("x-gateway-class"), "short_chat");
}

export async function aStreamSaysWhatTheWholeAnswerSays({ client, model }) {
  const whole = await client.chat.completions.create({ model, messages, max_tokens: 40 });
  const chunks = await all(client.chat.completions.create({ model, messages, max_tokens: 40, stream: true }));

  assert.ok(chunks.length > 1);  // a simulated server that is late says several tokens at once
  assert.equal(chunks.map((chunk) => chunk.choices[0].delta.content ?? "").join(""), whole.choices[0].message.content);
  assert.equal(chunks.at(-1).choices[0].finish_reason, "length");
  assert.ok(chunks.every((chunk) => chunk.object === "chat.completion.chunk" && chunk.model === model && !chunk.usage));
}

export async function usageEndsAStreamForWhoAsks({ client, model }) {
  const chunks = await all(client.chat.completions.create(
    { model, messages, max_tokens: 10, stream: true, stream_options: { include_usage: true } }));

  assert.deepEqual(chunks.at(-1).choices, []);
  assert.equal(chunks.at(-1).usage.completion_tokens, 10);
}

export async function theStreamHelperJoins({ client, model }) {
  const stream = client.chat.completions.stream(
    { model, messages, max_tokens: 40, stream_options: { include_usage: true } });
  let said = "";
  stream.on("content", (delta) => { said += delta; });
  const completion = await stream.finalChatCompletion();

  assert.ok(said.length > 0);
  assert.equal(completion.choices[0].message.content, said);
  assert.equal((await stream.totalUsage()).completion_tokens, 40);
}

export async function severalChoicesAllFinish({ client, model }) {
  const { choices } = await client.chat.completions.stream({ model, messages, max_tokens: 10, n: 3 })
    .finalChatCompletion();

  assert.deepEqual(choices.map((choice) => [choice.index, choice.finish_reason]),
    [[0, "length"], [1, "length"], [2, "length"]]);
}

export async function aToolIsCalled({ client, model }) {
  const { message, finish_reason } = (await client.chat.completions.create({ model, ...call })).choices[0];

  assert.equal(message.tool_calls.length, 1);
  assert.equal(message.tool_calls[0].type, "function");
  assert.equal(message.tool_calls[0].function.name, "get_weather");
  assert.equal(typeof JSON.parse(message.tool_calls[0].function.arguments).city, "string");
  assert.equal(finish_reason, "tool_calls");
}

export async function aToolCallIsStreamed({ client, model }) {
  const whole = await client.chat.completions.create({ model, ...call });
  const stream = client.chat.completions.stream({ model, ...call });
  const calls = [];
  stream.on("tool_calls.function.arguments.done", (done) => calls.push(done));
  const { message } = (await stream.finalChatCompletion()).choices[0];

  assert.deepEqual(calls.map((done) => done.name), ["get_weather"]);
  assert.deepEqual(message.tool_calls.map((one) => one.function.arguments),
    whole.choices[0].message.tool_calls.map((one) => one.function.arguments));
}

export async function aToolsResultIsTaken({ client, model }) {
  const asked = (await client.chat.completions.create({ model, ...call })).choices[0].message;
  const result = { role: "tool", tool_call_id: asked.tool_calls[0].id, content: "Rain." };
  const told = await client.chat.completions.create(
    { model, tools: call.tools, messages: [...call.messages, asked, result], max_tokens: 20 });

  assert.ok(told.choices[0].message.content.length > 0);
}

export async function theToolsHelperRunsThem({ client, model }) {
  const asked = [];
  const getWeather = (text) => { asked.push(JSON.parse(text)); return "Rain."; };
  const runner = client.chat.completions.runTools({ model, messages: call.messages, max_tokens: 200,
    tools: [{ type: "function", function: { ...WEATHER, function: getWeather } }] }, { maxChatCompletions: 4 });
  await runner.finalChatCompletion();

  assert.equal(typeof asked[0].city, "string");
  assert.ok((await runner.finalContent()).length > 0);
}

export async function aFormIsKept({ client, model }) {
  const completion = await client.chat.completions.parse(
    { model, messages, response_format: { type: "json_schema", json_schema: VERDICT } });

  assert.equal(typeof JSON.parse(completion.choices[0].message.content).score, "number");
}

export async function completionsWorkToo({ client, model }) {
  const whole = await client.completions.create({ model, prompt: "Name a river.", max_tokens: 10 });
  const parts = await all(client.completions.create({ model, prompt: "Name a river.", max_tokens: 10, stream: true }));

  assert.equal(parts.map((part) => part.choices[0].text).join(""), whole.choices[0].text);
}

export async function modelsAreListed({ client, sdk }) {
  const models = await all(client.models.list());

  assert.deepEqual(models.map((one) => one.id).slice(0, 2), ["gemma-4", "google/gemma-4-31B-it"]);
  assert.ok(models.every((one) => one.object === "model"));
  assert.equal((await client.models.retrieve("google/gemma-4-31B-it")).id, "google/gemma-4-31B-it");
  await refused(() => client.models.retrieve("gpt-5"), sdk.NotFoundError, { status: 404, code: "model_not_found" });
}

export async function whatIsWrongIsRefused({ client, model, sdk }) {
  for (const [fields, kind, members] of [
    [{ model: "gpt-5" }, sdk.NotFoundError, { status: 404, code: "model_not_found", param: "model" }],
    [{ messages: [] }, sdk.BadRequestError, { status: 400, code: "invalid_request", param: "messages" }],
    [{ temperature: -3 }, sdk.BadRequestError, { status: 400, code: "invalid_request", param: "temperature" }],
    [{ n: 99 }, sdk.BadRequestError, { status: 400, code: "too_many_choices", param: "n" }],
    [{ messages: [{ role: "user", content: "river ".repeat(60_000) }] }, sdk.BadRequestError,
      { status: 400, code: "context_length_exceeded", param: "messages" }],
  ])
    for (const stream of [false, true])
      await refused(() => client.chat.completions.create({ model, messages, stream, ...fields }), kind,
        { type: "invalid_request_error", ...members });
}

export async function aKeyIsAskedFor({ connect, model, sdk }) {
  await refused(() => connect("guess").chat.completions.create({ model, messages }), sdk.AuthenticationError,
    { status: 401, code: "invalid_api_key", type: "authentication_error" });
}

export async function backendsThatFailAre5xx({ client, model, sdk, site }) {
  for (const [fault, members] of [
    ["error", { status: 502, code: "upstream_failed" }],
    ["unavailable", { status: 503, code: "upstream_busy" }],
  ])
    await withFault(site, { fault }, () => refused(() => client.chat.completions.create({ model, messages }),
      sdk.InternalServerError, { type: "server_error", ...members }));
}

export async function whoIsToldToComeBackDoes({ connect, model, site }) {
  let first, asked;
  const answered = new Promise((resolve) => { first = resolve; });
  const listen = async (...request) => {
    const answer = await fetch(...request);
    first(answer);
    return answer;
  };
  const client = connect("a", { maxRetries: 1, fetch: listen });
  await withFault(site, { fault: "unavailable" }, () => {
    asked = client.chat.completions.create({ model, messages, max_tokens: 5 });
    return answered;
  });

  assert.equal((await answered).status, 503);
  assert.match((await answered).headers.get("retry-after"), /^[1-5]?[0-9]$/);
  assert.ok((await asked).choices[0].message.content.length > 0);
}

export async function aStreamThatBreaksThrows({ client, model, sdk, site }) {
  const said = [];
  await withFault(site, { fault: "die_mid_stream", after_chunks: 5 }, async () => {
    const stream = await client.chat.completions.create({ model, messages, max_tokens: 200, stream: true });
    await refused(async () => { for await (const chunk of stream) said.push(chunk); }, sdk.APIError,
      { status: undefined, code: "stream_broken", type: "server_error" });
  });

  assert.ok(said.length > 0);
}

export async function commentsPassUnseen({ connect }) {
  const heard = [];
  const client = connect("a", { fetch: listening(heard) });
  const chunks = await all(client.chat.completions.create(
    { model: "patient", messages: [{ role: "user", content: LONG }], max_tokens: 5, stream: true }));

  assert.match(await heard[0], /^: keep-alive\n\ndata: /);
  assert.equal(chunks.at(-1).choices[0].finish_reason, "length");
}
