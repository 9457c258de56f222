// Webhooks of jobs that have ended.

import assert from "node:assert/strict";
import { until } from "./support.mjs";

export async function oneIsUnwrapped({ connect, sdk, site }) {
  const client = connect("a", { webhookSecret: site.webhook_secret });
  const job = await client.responses.create(
    { model: "gemma-4", input: "Why is the sky blue?", background: true, max_output_tokens: 5 });
  const { headers, body } = await until(async () =>
    (await (await fetch(site.webhooks)).json()).find((delivery) => delivery.body.includes(job.id)));
  const event = await client.webhooks.unwrap(body, headers);

  assert.equal(event.object, "event");
  assert.equal(event.type, "response.incomplete");
  assert.equal(event.id, headers["webhook-id"]);
  assert.equal((await client.responses.retrieve(event.data.id)).status, "incomplete");
  await assert.rejects(client.webhooks.unwrap(body.replace("incomplete", "completed"), headers),
    sdk.OpenAI.InvalidWebhookSignatureError ?? sdk.InvalidWebhookSignatureError);
}
