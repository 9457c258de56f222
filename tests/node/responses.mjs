// The Responses API through the unmodified Node SDK. A check by hand, because the tests need nothing but Python:
//
//   gemma-gateway simulate --profile h100-tp1-light --port 9001 &
//   gemma-gateway serve --config GATEWAY.yaml &            # one backend at 127.0.0.1:9001
//   npm install openai && node tests/node/responses.mjs http://127.0.0.1:8080/v1 gemma-4
//
// Simulated backends, whose text is the same each time, are what it compares by.
// It ends with status 1 at the first thing that is not as it should be.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { createRequire } from "node:module";

// The package is looked for where the command is run, not beside this file.
const find = createRequire(join(process.cwd(), "x.js"));
const OpenAI = find("openai");
const version = JSON.parse(readFileSync(join(process.cwd(), "node_modules/openai/package.json"))).version;
const [baseURL, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: process.env.OPENAI_API_KEY ?? "unused", maxRetries: 0 });
const tools = [{ type: "function", name: "get_weather", strict: false, description: "Weather.",
  parameters: { type: "object", properties: { city: { type: "string" } } } }];

const first = await client.responses.create({ model, input: "Why is the sky blue?", metadata: { ticket: "7" } });
assert.equal(first.status, "completed");
assert.ok(first.output_text.length > 0);
assert.ok(first.usage.output_tokens > 0);
assert.deepEqual(first.metadata, { ticket: "7" });

const stream = await client.responses.create({ model, input: "Why is the sky blue?", stream: true });
const events = [];
for await (const event of stream) events.push(event);
assert.deepEqual(events.map((event) => event.sequence_number), events.map((_, index) => index));
assert.equal(events[0].type, "response.created");
assert.equal(events.at(-1).type, "response.completed");
const deltas = events.filter((event) => event.type === "response.output_text.delta");
assert.equal(deltas.map((event) => event.delta).join(""), first.output_text);

const helped = client.responses.stream({ model, input: "Why is the sky blue?" });
assert.equal((await helped.finalResponse()).output_text, first.output_text);

const format = { type: "json_schema", name: "verdict", strict: true,
  schema: { type: "object", properties: { score: { type: "integer" } }, required: ["score"], additionalProperties: false } };
const parsed = await client.responses.parse({ model, input: "Judge this.", text: { format } });
assert.equal(typeof parsed.output_parsed.score, "number");

const asked = await client.responses.create({ model, input: "Call get_weather for Paris.", tools, tool_choice: "required" });
const call = asked.output.at(-1);
assert.equal(call.name, "get_weather");
const told = await client.responses.create({ model, tools, previous_response_id: asked.id,
  input: [{ type: "function_call_output", call_id: call.call_id, output: "Rain." }] });
assert.ok(told.output_text.length > 0);

assert.equal((await client.responses.retrieve(first.id)).output_text, first.output_text);
const items = [];
for await (const item of client.responses.inputItems.list(told.id, { limit: 1 })) items.push(item.type);
assert.deepEqual(items, ["function_call_output", "function_call", "message"]);
await client.responses.delete(first.id);
await assert.rejects(client.responses.retrieve(first.id), (error) => error.status === 404 && error.code === "response_not_found");
await assert.rejects(client.responses.create({ model, input: "x", background: true }),
  (error) => error.status === 400 && error.code === "background_not_supported");

console.log(`ok: openai ${version} on node ${process.version}`);
