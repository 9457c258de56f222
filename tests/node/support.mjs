// What several groups of checks need.

import assert from "node:assert/strict";
import { setTimeout as pause } from "node:timers/promises";

export const SKY = "Why is the sky blue?";
export const LONG = "The river runs past the old mill. ".repeat(400);
export const WEATHER = { name: "get_weather", description: "Weather of a city.",
  parameters: { type: "object", properties: { city: { type: "string" } } } };
export const VERDICT = { name: "verdict", strict: true, schema: { type: "object", additionalProperties: false,
  properties: { score: { type: "integer" } }, required: ["score"] } };

// `fetch`, which notes what each answer says, comments included.
export const listening = (heard) => async (...request) => {
  const answer = await fetch(...request);
  heard.push(answer.clone().text());
  return answer;
};

// Everything that a stream or a list of pages yields.
export async function all(items) {
  const found = [];
  for await (const item of await items) found.push(item);
  return found;
}

// That a request is refused: by an error of that kind, with these members.
export async function refused(request, kind, members) {
  const error = await request().then(
    (answer) => assert.fail(`not refused: ${JSON.stringify(answer)}`), (thrown) => thrown);
  if (!(error instanceof kind)) throw error;
  const found = Object.fromEntries(Object.keys(members).map((name) => [name, error[name]]));
  assert.deepEqual(found, members);
  assert.match(error.requestID, /^req-/);
}

// What `ask` says, once it says something.
export async function until(ask, withinS = 20) {
  for (const deadline = Date.now() + withinS * 1000; Date.now() < deadline; await pause(20)) {
    const found = await ask();
    if (found) return found;
  }
  return assert.fail(`not within ${withinS} s: ${ask}`);
}

// A response once it is over.
export const ended = (client, id) => until(async () => {
  const response = await client.responses.retrieve(id);
  return ["queued", "in_progress"].includes(response.status) ? null : response;
});

// Every simulated backend has that fault for what is sent to it while `run` runs.
export async function withFault(site, order, run) {
  const say = (fault) => Promise.all(site.backends.map((url) =>
    fetch(`${url}/simulator/fault`, { method: "POST", body: JSON.stringify(fault) }).then((answer) =>
      assert.equal(answer.ok, true))));
  await say(order);
  try {
    return await run();
  } finally {
    await say({ fault: null });
  }
}
