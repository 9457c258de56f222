// Files of requests, and batches of them.

import assert from "node:assert/strict";
import { all, refused, SKY, until } from "./support.mjs";

const over = ["completed", "failed", "expired", "cancelled"];
const line = (custom_id, url, body) => JSON.stringify({ custom_id, method: "POST", url, body: { model: "gemma-4", ...body } });
const chat = (id, more = {}) => line(id, "/v1/chat/completions",
  { messages: [{ role: "user", content: SKY }], max_completion_tokens: 8, ...more });
const response = (id) => line(id, "/v1/responses", { input: SKY, max_output_tokens: 8 });
const ids = (lines) => lines.map((one) => one.custom_id).sort();

const upload = async (client, lines) => client.files.create({
  file: new File([lines.join("\n")], "in.jsonl"), purpose: "batch",
  expires_after: { anchor: "created_at", seconds: 7200 } });
const handedOver = async (client, lines, endpoint, more = {}) => client.batches.create({
  input_file_id: (await upload(client, lines)).id, endpoint, completion_window: "24h", ...more });
const ended = (client, id) => until(async () => {
  const batch = await client.batches.retrieve(id);
  return over.includes(batch.status) ? batch : undefined;
}, 60);
const linesOf = async (client, id) =>
  (await (await client.files.content(id)).text()).trim().split("\n").map((one) => JSON.parse(one));

export async function chatsAreWorkedOff({ client }) {
  const made = await handedOver(client, [chat("a"), chat("b"), chat("c", { model: "gpt-9" })],
    "/v1/chat/completions", { metadata: { ticket: "7" } });
  assert.equal(made.status, "validating");
  const done = await ended(client, made.id);

  assert.equal(done.status, "completed");
  assert.deepEqual(done.metadata, { ticket: "7" });
  assert.deepEqual(done.request_counts, { total: 3, completed: 2, failed: 1 });
  const answers = await linesOf(client, done.output_file_id);
  assert.deepEqual(ids(answers), ["a", "b"]);
  assert.ok(answers.every((one) => one.response.body.choices[0].message.content.length > 0));
  const [refusal] = await linesOf(client, done.error_file_id);
  assert.equal(refusal.response.status_code, 404);
  assert.equal(refusal.response.body.error.code, "model_not_found");
}

export async function responsesAreWorkedOff({ client }) {
  const done = await ended(client, (await handedOver(client, [response("a"), response("b")], "/v1/responses")).id);
  assert.equal(done.status, "completed");
  const answers = await linesOf(client, done.output_file_id);
  assert.deepEqual(ids(answers), ["a", "b"]);
  assert.ok(answers.every((one) => one.response.body.output[0].content[0].text.length > 0));
}

export async function oneIsCancelled({ client }) {
  const made = await handedOver(client, [chat("a", { max_completion_tokens: 20_000, ignore_eos: true })],
    "/v1/chat/completions");
  assert.ok(["cancelling", "cancelled"].includes((await client.batches.cancel(made.id)).status));
  assert.equal((await ended(client, made.id)).status, "cancelled");
}

export async function theyAreListedPageByPage({ client }) {
  const made = [];
  for (const id of ["a", "b", "c"]) made.push((await handedOver(client, [chat(id)], "/v1/chat/completions")).id);
  const first = await client.batches.list({ limit: 2 });
  assert.equal(first.has_more, true);
  const found = (await all(client.batches.list({ limit: 2 }))).map((batch) => batch.id);
  assert.deepEqual(found.slice(0, 3), made.toReversed());
  for (const id of made) await ended(client, id);
}

export async function filesAreReadAndDeleted({ client }) {
  const file = await upload(client, [chat("a")]);
  assert.equal(file.expires_at, file.created_at + 7200);
  assert.deepEqual(await client.files.retrieve(file.id), file);
  assert.equal(await (await client.files.content(file.id)).text(), chat("a"));
  assert.ok((await all(client.files.list({ purpose: "batch", limit: 1 }))).some((one) => one.id === file.id));
  assert.equal((await client.files.delete(file.id)).deleted, true);
}

export async function whatIsAnotherKeysIsNotThere({ client, other, sdk }) {
  const file = await upload(client, [chat("a")]);
  const batch = await handedOver(client, [chat("a")], "/v1/chat/completions");
  const gone = (what) => [sdk.NotFoundError ?? sdk.OpenAI.NotFoundError, { status: 404, code: `${what}_not_found` }];
  await refused(() => other.files.retrieve(file.id), ...gone("file"));
  await refused(() => other.batches.retrieve(batch.id), ...gone("batch"));
  await ended(client, batch.id);
}

export async function whoeverIsToldOfItsEndFindsIt({ connect, site }) {
  const client = connect("a", { webhookSecret: site.webhook_secret });
  const batch = await handedOver(client, [chat("a")], "/v1/chat/completions");
  const { headers, body } = await until(async () =>
    (await (await fetch(site.webhooks)).json()).find((delivery) => delivery.body.includes(batch.id)));
  const event = await client.webhooks.unwrap(body, headers);

  assert.equal(event.type, "batch.completed");
  assert.equal((await client.batches.retrieve(event.data.id)).status, "completed");
}
