// Each backend as a gauge.

import { at, clock, h, keyed, number, percent, s, say, width, words } from "./dom.js";

const ARC = "M 10 56 A 46 46 0 0 1 102 56";
const CALM = new Set(["up", "out"]);

export function showFleet(snapshot) {
  const boxes = boxOfBackend(snapshot.boxes);
  keyed(at("backends"), Object.entries(snapshot.backends), ([name]) => name, card, (element, [name, backend]) =>
    update(element, name, backend, boxes.get(name)),
  );
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
    { "data-backend": name },
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
  const isOff = !["up", "probation", "unknown"].includes(backend.state);
  element.dataset.level = isOff ? "off" : level(used);
  element.dataset.state = backend.drain ? "draining" : backend.state;
  say(of(".state"), backend.drain ? "drained" : words(backend.state));
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
  say(of(".why"), whyWords(backend));
}

function boxWords(name, box) {
  const next = box.next;
  const soon = next.in_s === null ? "" : ` in ${clock(next.in_s)}`;
  const waits = box.waiting[name]?.requests;
  const queue = waits ? `; ${number(waits)} waiting for it` : "";
  if (!box.backend) return `${box.id}: ${words(box.state)}${box.reason ? `: ${box.reason}` : ""}${queue}`;
  if (box.backend === name) {
    const leaves = next.backend && next.backend !== name ? `; then ${next.backend}${soon}` : "";
    return `${box.id}: ${words(box.state)}${leaves}${queue}`;
  }
  if (box.quarantine[name]) return `${box.id}: in quarantine: ${box.quarantine[name]}${queue}`;
  const comes = next.backend === name ? `; starts${soon || " next"}` : "";
  return `${box.id}: not running${comes}${queue}`;
}

function whyWords(backend) {
  if (backend.drain) return "drained by the operator";
  if (!CALM.has(backend.state)) return `${backend.reason} (${clock(backend.for_s)})`;
  if (backend.model_error) return backend.model_error;
  if (backend.kept_out) return backend.kept_out;
  const tpot = backend.tpot;
  if (tpot && tpot.knee_share < 0.995) return `TPOT target ${Math.round(tpot.target_ms)} ms allows ${percent(tpot.knee_share)} of the knee`;
  if (backend.restarts) return `${number(backend.restarts)} restart${backend.restarts === 1 ? "" : "s"} detected`;
  return "";
}
