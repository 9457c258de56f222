// Runs the checks of one group, with one SDK, against a running gateway: `node runner.mjs PACKAGE GROUP SITE`.
//
// Each exported function of GROUP.mjs is a check; it throws where something is not as it should be. SITE is what
// it needs to know of the gateway, as JSON. Each check is answered with a line of JSON on standard output:
// {"check": NAME, "error": null or what was thrown}.

const [name, group, facts] = process.argv.slice(2);
const site = JSON.parse(facts);
const sdk = await import(name);
const checks = await import(`./${group}.mjs`);

// Without retries, so that a check sees each answer.
const connect = (apiKey, options = {}) =>
  new sdk.OpenAI({ baseURL: `${site.url}/v1`, apiKey, maxRetries: 0, timeout: 30_000, ...options });
const world = { sdk, site, connect, client: connect("a"), other: connect("b"), model: "gemma-4" };

// What is thrown where nobody waits for it counts against the check that runs.
let thrown = [];
process.on("unhandledRejection", (error) => thrown.push(error));

for (const [check, run] of Object.entries(checks)) {
  thrown = [];
  await run(world).catch((error) => thrown.push(error));
  const error = thrown.length === 0 ? null : thrown.map((one) => one?.stack ?? String(one)).join("\n\n");
  console.log(JSON.stringify({ check, error }));
}
