// Each backend as a gauge.

import { at, clock, h, keyed, number, percent, s, say, width, words } from "./dom.js";

const ARC = "M 10 56 A 46 46 0 0 1 102 56";
const CALM = new Set(["up", "out"]);
const TURNING = new Set(["out", "booting"]); // as a model of a box is while another has its turn

export function showFleet(snapshot) {
  const boxes = boxOfBackend(snapshot.boxes);
  summarize(Object.entries(snapshot.backends), boxes);
  keyed(at("backends"), Object.entries(snapshot.backends), ([name]) => name, card, (element, [name, backend]) =>
    update(element, name, backend, boxes.get(name)),
  );
}

/** How many backends take requests, which pools are without any, and a link to each one that is not well. */
function summarize(backends, boxes) {
  const missing = new Set(backends.filter(([name, backend]) => isMissing(name, backend, boxes.get(name))).map(([name]) => name));
  const pools = new Map();
  for (const [name, backend] of backends) {
    for (const pool of backend.pools) pools.set(pool, (pools.get(pool) ?? true) && missing.has(name));
  }
  const empty = [...pools].filter(([, isEmpty]) => isEmpty).map(([pool]) => pool);
  const unwell = backends.filter(([name, backend]) => missing.has(name) || backend.state === "probation");
  at("fleet-summary").hidden = !unwell.length;
  say(at("fleet-taking"), `${number(backends.length - missing.size)} of ${number(backends.length)} backends take requests.`);
  say(at("fleet-empty"), empty.length ? `Pools without any: ${empty.join(", ")}.` : "");
  keyed(at("fleet-unwell"), unwell, ([name]) => name, link, (element, [name, backend]) => {
    const [state, says] = stateOf(name, backend, boxes.get(name));
    element.dataset.state = state;
    say(element.querySelector(".state"), says);
  });
}

/** Whether it takes no requests, and none would wait for it. */
function isMissing(name, backend, box) {
  return Boolean(backend.kept_out) && !isTurning(name, backend, box);
}

/** Whether it waits for its turn on its box, has just got it, or gives it to another. */
function isTurning(name, backend, box) {
  return Boolean(box) && box.state !== "failed" && !box.quarantine[name] && !backend.drain && (TURNING.has(backend.state) || isLeaving(backend));
}

const isLeaving = (backend) => backend.state === "up" && backend.kept_out.startsWith("swapped_out");

function link([name]) {
  return h("li", {}, h("a", { href: `#backend-${name}`, text: name }), " ", h("span", { class: "state" }));
}

/** Its state, and how it is called. A server that is up and yet gets nothing is not shown as up. */
function stateOf(name, backend, box) {
  if (backend.drain) return ["draining", "drained"];
  if (isLeaving(backend) && isTurning(name, backend, box)) return ["draining", box.backend === name ? words(box.state) : "out"];
  if (backend.state === "up" && backend.kept_out) return ["kept-out", words(backend.kept_out.split(":")[0])];
  if (box?.quarantine[name]) return ["kept-out", "in quarantine"];
  if (box?.state === "failed") return ["kept-out", "box failed"];
  return [backend.state, words(backend.state)];
}

function boxOfBackend(boxes) {
  const found = new Map();
  for (const [id, box] of Object.entries(boxes)) {
    for (const name of Object.keys(box.waiting)) found.set(name, { id, ...box });
  }
  return found;
}

function card([name]) {
  const arc = s("path", { d: ARC, class: "arc", pathLength: 100, "stroke-dasharray": "0 100" });
  const gauge = s(
    "svg",
    { viewBox: "0 0 112 62", class: "gauge", role: "meter", "aria-valuemin": 0, "aria-valuemax": 100 },
    s("path", { d: ARC, class: "track" }),
    arc,
    s("text", { x: 56, y: 50, class: "count" }),
    s("text", { x: 56, y: 61, class: "of" }),
  );
  return h(
    "li",
    { "data-backend": name, id: `backend-${name}` },
    h("div", { class: "top" }, h("strong", { text: name }), h("span", { class: "state" })),
    h("p", { class: "pools" }),
    gauge,
    h(
      "dl",
      { class: "meters" },
      h("dt", { text: "KV" }),
      h("dd", {}, h("span", { class: "bar" }, h("i"), h("b")), h("span", { class: "value" })),
      h("dt", { text: "engine" }),
      h("dd", { class: "engine" }),
      h("dt", { text: "version" }),
      h("dd", { class: "version" }),
    ),
    h("p", { class: "box" }),
    h("p", { class: "why" }),
  );
}

function level(share) {
  if (share >= 0.97) return "full";
  return share >= 0.8 ? "high" : "calm";
}

function update(element, name, backend, box) {
  const of = (selector) => element.querySelector(selector);
  const used = backend.knee_used;
  const [state, says] = stateOf(name, backend, box);
  const isOff = !["up", "probation", "unknown"].includes(backend.state) || state === "kept-out";
  element.dataset.level = isOff ? "off" : level(used);
  element.dataset.state = state;
  say(of(".state"), says);
  say(of(".pools"), [backend.pools.join(", "), backend.profile].filter(Boolean).join(" · "));

  const gauge = of(".gauge");
  const shown = Math.min(100, Math.round(100 * used));
  gauge.setAttribute("aria-valuenow", Math.round(100 * used));
  gauge.setAttribute("aria-label", `${name}: ${backend.in_flight} in flight, ${percent(used)} of its knee`);
  of(".arc").setAttribute("stroke-dasharray", `${shown} 100`);
  say(of(".count"), number(backend.in_flight));
  say(of(".of"), `knee ${number(backend.knee_seqs)} · ${percent(used)}`);

  const engine = backend.engine;
  const planned = backend.kv_blocks_planned ? backend.kv_blocks / backend.kv_blocks_planned : null;
  of(".bar i").style.width = engine ? width(engine.kv_usage) : "0";
  of(".bar b").hidden = planned === null;
  of(".bar b").style.left = planned === null ? "0" : width(planned);
  of(".bar").title = planned === null ? "used by the engine" : `used by the engine; mark: reserved by the gateway (${percent(planned)})`;
  say(of(".meters .value"), engine ? percent(engine.kv_usage) : "–");
  say(of(".engine"), engine ? `${number(engine.running)} run, ${number(engine.waiting)} queue` : "no data");
  of(".engine").classList.toggle("attention", Boolean(engine && engine.waiting));
  say(of(".version"), backend.engine_version || "–");

  say(of(".box"), box ? boxWords(name, box) : "");
  say(of(".why"), whyWords(name, backend, box));
}

function boxWords(name, box) {
  const next = box.next;
  const soon = next.in_s === null ? "" : ` in ${clock(next.in_s)}`;
  const waits = box.waiting[name]?.requests;
  const queue = waits ? `; ${number(waits)} waiting for it` : "";
  if (!box.backend) return `${box.id}: ${words(box.state)}${box.reason ? `: ${box.reason}` : ""}${queue}`;
  if (box.backend === name) {
    const leaves = next.backend && next.backend !== name ? `; then ${next.backend}${soon}` : "";
    const holds = box.waits_for ? ` (waits for ${box.waits_for})` : "";
    return `${box.id}: ${words(box.state)}${holds}${leaves}${queue}`;
  }
  if (box.quarantine[name]) return `${box.id}: in quarantine: ${box.quarantine[name]}${queue}`;
  const comes = next.backend === name ? `; starts${soon || " next"}` : "";
  return `${box.id}: not running${comes}${queue}`;
}

function whyWords(name, backend, box) {
  if (backend.drain) return "drained by the operator";
  if (!CALM.has(backend.state)) return `${backend.reason} (${clock(backend.for_s)})`;
  if (backend.model_error) return backend.model_error;
  if (isMissing(name, backend, box)) return backend.kept_out;
  const tpot = backend.tpot;
  if (tpot && tpot.knee_share < 0.995) return `TPOT target ${Math.round(tpot.target_ms)} ms allows ${percent(tpot.knee_share)} of the knee`;
  if (backend.restarts) return `${number(backend.restarts)} restart${backend.restarts === 1 ? "" : "s"} detected`;
  return "";
}
