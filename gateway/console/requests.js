// The last requests. One that is opened shows where its time went, and why it went where it went.

import { FINE, ask, at, classWords, h, keyed, number, round, say, seconds, timeOfDay, words } from "./dom.js";
import { candidateTable, demandLine, nobodyWords } from "./decision.js";
import { swatch } from "./waiting.js";

const SHOWN = 30;
const KEPT = { ordinary: 400, notable: 300 }; // as many notable ones as the gateway keeps
const ID = /^req-[0-9a-f]{32}$/;
const COLUMNS = 11;
const LEAST_S = 0.01; // of what takes less, bars are in proportion; of what takes more, logarithmic

let rows = [];
let shown = [];
let known = []; // rows, when `shown` was chosen
let open = null;
let isHeld = false;
let current = 0;
let asked = ""; // the id that was looked for at the gateway, last
let onWhatIf = () => {};

export function startRequests(options) {
  onWhatIf = options.onWhatIf;
  at("only-notable").addEventListener("change", () => show(true));
  at("find").addEventListener("input", () => {
    show(true);
    lookFor(at("find").value.trim());
  });
  at("request-filter").addEventListener("submit", (event) => event.preventDefault());
  at("hold").addEventListener("click", () => hold(!isHeld));
  at("request-table").addEventListener("keydown", moved);
}

/** The gateway tells all it keeps when a console connects: what is known from before may be another's. */
export function forgetRequests() {
  rows = [];
}

export function takeRequests(more) {
  const all = [...more, ...rows].sort((one, other) => other.number - one.number);
  const room = { ...KEPT };
  rows = all.filter((row) => (room[row.is_notable ? "notable" : "ordinary"] -= 1) >= 0);
  show(false);
}

/** Shows a request that is named and not in the list: the gateway keeps more than a console is told of. */
async function lookFor(id) {
  asked = id;
  const place = at("found-request");
  place.replaceChildren();
  if (!ID.test(id) || shown.some((row) => row.id === id)) return;
  let found;
  try {
    found = detail(await ask(`admin/request/${id}`));
  } catch (error) {
    found = h("p", { class: "note", text: error.message });
  }
  if (asked === id) place.replaceChildren(found);
}

function hold(wanted) {
  isHeld = wanted;
  at("hold").setAttribute("aria-pressed", String(isHeld));
  show(true);
}

function fits(row, text) {
  if (at("only-notable").checked && !row.is_notable) return false;
  return !text || [classWords(row.model, row.class), row.backend, row.key, row.id, row.code, row.ending].some((part) => part?.toLowerCase().includes(text));
}

/** Draws the list again: its classes are called otherwise. */
export const renameClasses = () => show(false);

/** Draws the list. Held, or with a request open, it stays as it is until it is asked for anew. */
function show(isAsked) {
  const text = at("find").value.trim().toLowerCase();
  const found = rows.filter((row) => fits(row, text));
  if (isAsked || !(isHeld || open)) {
    known = rows;
    shown = found.slice(0, SHOWN);
    if (open && !shown.some((row) => row.id === open)) {
      const kept = rows.find((row) => row.id === open);
      if (kept) shown = [...shown, kept];
      else open = null;
    }
  }
  const newer = isHeld || open ? newerThan(known, found) : 0;
  say(at("hold"), isHeld || open ? `${isHeld ? "Held" : "Held while one is open"}${newer ? `, ${number(newer)} newer` : ""}` : "Hold");
  at("no-requests").hidden = shown.length > 0 || ID.test(text);
  say(at("no-requests"), rows.length ? "No recent request matches." : "No request has ended yet.");
  current = Math.min(current, Math.max(0, shown.length - 1));
  const longest = Math.max(...shown.map((row) => row.total_s), 0.001);
  keyed(at("request-table"), ["head", ...shown], (item) => (item === "head" ? "head" : item.id), body, (element, item) => {
    if (item !== "head") refresh(element, item, longest);
  });
}

/** How many have come since: told by their ids, because another gateway process numbers its requests anew. */
function newerThan(before, found) {
  const ids = new Set(before.map((row) => row.id));
  return found.filter((row) => !ids.has(row.id)).length;
}

function body(row) {
  const button = h("button", { type: "button", class: "opener", "aria-expanded": "false", text: timeOfDay(row.at + row.total_s), onclick: () => toggle(row.id) });
  return h(
    "tbody",
    { "data-request": row.id, "data-ending": row.ending },
    h(
      "tr",
      { onclick: (event) => event.target.closest("button") || toggle(row.id) },
      h("td", {}, button),
      h("td", { class: "name" }, swatch(row.class), h("span", { class: "class" })),
      h("td", { class: "name" }, row.backend || "–", row.is_spill ? h("span", { class: "tag", text: "spill" }) : null, row.tries > 1 ? h("span", { class: "tag bad", text: `${row.tries} tries` }) : null),
      h("td", { class: `ending ${row.ending}`, text: row.code ? `${row.status} ${words(row.code)}` : words(row.ending) }),
      h("td", { class: "n", text: number(row.prompt_tokens) }),
      h("td", { class: "n", text: number(row.completion_tokens) }),
      h("td", { class: "n", text: row.waited_s !== null && row.waited_s < 0.005 ? "0" : seconds(row.waited_s) }),
      h("td", { class: row.ttft_target_s !== null && row.ttft_s > row.ttft_target_s ? "n attention" : "n", text: seconds(row.ttft_s) }),
      h("td", { class: "n", text: seconds(row.tpot_s) }),
      h("td", { class: "n", text: seconds(row.total_s) }),
      h("td", { class: "where" }, h("span", { class: "phases" }, h("i", { class: "k-wait" }), h("i", { class: "k-first" }), h("i", { class: "k-decode" }))),
    ),
  );
}

function refresh(element, row, longest) {
  const index = shown.indexOf(row);
  element.querySelector(".opener").tabIndex = index === current ? 0 : -1;
  say(element.querySelector(".class"), classWords(row.model, row.class) || "–");
  const waited = row.waited_s ?? 0;
  const first = row.ttft_s === null ? (row.total_s - waited) : Math.max(0, row.ttft_s - waited);
  const rest = Math.max(0, row.total_s - waited - first);
  const [wait, start, decode] = element.querySelectorAll(".phases i");
  const isBad = !FINE.has(row.ending);
  start.className = isBad && row.ttft_s === null ? "k-bad" : row.stream ? "k-first" : "k-decode";
  const width = (100 * extent(row.total_s)) / extent(longest);
  for (const [part, value] of [[wait, waited], [start, first], [decode, rest]]) part.style.width = `${(width * value) / Math.max(row.total_s, 1e-9)}%`;
}

/** How long a bar is for it: chats of a second are to be read beside documents of three minutes. */
const extent = (taken) => Math.log1p(taken / LEAST_S);

function moved(event) {
  const steps = { ArrowDown: 1, ArrowUp: -1, Home: -Infinity, End: Infinity };
  if (event.key === "Escape" && open) {
    event.preventDefault();
    toggle(open);
  } else if (event.key in steps && event.target.classList.contains("opener")) {
    event.preventDefault();
    current = Math.max(0, Math.min(shown.length - 1, shown.findIndex((row) => row.id === event.target.closest("tbody").dataset.request) + steps[event.key]));
    const openers = [...at("request-table").querySelectorAll(".opener")];
    openers.forEach((opener, index) => (opener.tabIndex = index === current ? 0 : -1));
    openers[current]?.focus();
  }
}

const bodyOf = (id) => at("request-table").querySelector(`tbody[data-request="${CSS.escape(id)}"]`);

function close() {
  if (!open) return;
  const element = bodyOf(open);
  element?.querySelector(".detail")?.remove();
  element?.querySelector(".opener").setAttribute("aria-expanded", "false");
  open = null;
}

async function toggle(id) {
  const wasOpen = open === id;
  close();
  current = Math.max(0, shown.findIndex((row) => row.id === id));
  const element = bodyOf(id);
  element.querySelector(".opener").focus();
  if (wasOpen) {
    show(false);
    return;
  }
  open = id;
  element.querySelector(".opener").setAttribute("aria-expanded", "true");
  const cell = h("td", { colspan: COLUMNS }, h("p", { class: "note", text: "…" }));
  element.append(h("tr", { class: "detail" }, cell));
  show(false);
  try {
    cell.replaceChildren(detail(await ask(`admin/request/${encodeURIComponent(id)}`)));
  } catch (error) {
    cell.replaceChildren(h("p", { class: "note", text: error.message }));
  }
}

// ------------------------------------------------------------------ one request

function detail(record) {
  const phases = phasesOf(record);
  const decision = record.decision;
  return h(
    "div",
    { class: "opened" },
    h("p", { class: "verdict", text: verdict(record, phases) }),
    waterfall(record, phases),
    ...failureWords(phases),
    decision ? h("p", { class: "demand" }, h("b", { text: decision.traffic_class }), `: ${decision.class_reason}. ${demandLine(decision)}.`) : null,
    decision ? h("h3", { text: "Candidates when it arrived" }) : null,
    decision ? candidateTable(decision.candidates, record.backend) : null,
    placedWords(record),
    cachedWords(record),
    h(
      "p",
      { class: "row" },
      h("code", { text: record.id }),
      h("span", { class: "note", text: `arrived ${timeOfDay(record.wall_at)}${record.key ? `, key ${record.key}` : ""}` }),
      decision ? h("button", { type: "button", text: "What if…", onclick: () => onWhatIf(record.id) }) : null,
    ),
  );
}

/** What happened when, in seconds since its arrival. */
function phasesOf(record) {
  const since = (time) => (time === null ? null : time - record.received_at);
  const end = since(record.ended_at);
  const found = [{ name: "read and count tokens", kind: "estimate", from: 0, to: since(record.estimated_at) ?? end }];
  let from = found[0].to;
  for (const [index, attempt] of record.attempts.entries()) {
    const started = since(attempt.started_at);
    found.push({ name: index ? "wait again" : "wait for a slot", kind: "wait", from, to: started });
    const connected = since(attempt.connected_at);
    if (connected !== null && connected > started) found.push({ name: `connect to ${attempt.backend}`, kind: "connect", from: started, to: connected });
    const first = since(attempt.first_byte_at);
    const over = since(attempt.ended_at);
    const isGood = ["ok", "cancelled"].includes(attempt.outcome);
    const where = record.attempts.length > 1 ? `${attempt.backend}, try ${index + 1}` : attempt.backend;
    if (first === null) {
      found.push({ name: isGood ? `no token yet from ${where}` : `${words(attempt.outcome)} on ${where}`, kind: isGood ? "first" : "bad", from: started, to: over, detail: attempt.detail });
    } else if (!record.stream) {
      found.push({ name: `whole answer from ${where}`, kind: isGood ? "decode" : "bad", from: connected ?? started, to: over, detail: attempt.detail });
    } else {
      const asked = connected ?? started;
      found.push({ name: `first token from ${where}`, kind: "first", from: asked, to: first });
      found.push({ name: `${isGood ? "decode" : words(attempt.outcome)} on ${where}`, kind: isGood ? "decode" : "bad", from: first, to: over, detail: attempt.detail });
    }
    from = over;
  }
  const last = record.attempts.at(-1);
  // Once an answer has begun, no other backend can take over.
  const isOver = last ? record.first_byte_at !== null || ["ok", "cancelled"].includes(last.outcome) : FINE.has(record.ending) && record.ending !== "left";
  if (isOver && end - from > 0.01 * end) found.push({ name: "end", kind: "estimate", from, to: end });
  else if (!isOver && record.decision && end - from > 0.001) found.push({ name: last ? "wait again" : "wait for a slot", kind: "wait", from, to: end });
  return found;
}

function verdict(record, phases) {
  const total = record.ended_at - record.received_at;
  const went = record.backend ? `on ${record.backend}${record.is_spill ? ", as a spill" : ""}` : "on no backend";
  const how = record.error_code ? `${words(record.ending)} with ${record.status} ${record.error_code}` : record.ending === "left" ? "the caller left" : words(record.ending);
  const longest = phases.reduce((one, other) => (other.to - other.from > one.to - one.from ? other : one));
  const share = (longest.to - longest.from) / Math.max(total, 1e-9);
  const most = share > 0.4 ? ` Most of it: ${longest.name}, ${seconds(longest.to - longest.from)}.` : "";
  const nobody = longest.kind === "wait" && record.decision ? nobodyWords(record.decision.candidates) : "";
  return `${how[0].toUpperCase()}${how.slice(1)}, ${went}, in ${seconds(total)}.${most}${nobody ? ` No backend had a free slot (${nobody}).` : ""}${lateWords(record, phases)}`;
}

/** Where the time to a late first token went. */
function lateWords(record, phases) {
  const first = record.stream && record.first_byte_at !== null ? record.first_byte_at - record.received_at : null;
  if (first === null || !record.ttft_target_s || first <= record.ttft_target_s) return "";
  const before = phases.filter((phase) => phase.from < first - 1e-6 && phase.to - phase.from > 0.05 * first);
  const told = before.map((phase) => `${seconds(phase.to - phase.from)} ${phase.name}`).join(", ");
  return ` First token after ${seconds(first)}, later than its class's target of ${round(record.ttft_target_s)}: ${told}.`;
}

function waterfall(record, phases) {
  const total = Math.max(record.ended_at - record.received_at, 1e-6);
  const target = record.ttft_target_s && record.ttft_target_s <= total ? record.ttft_target_s : null;
  return h(
    "ol",
    { class: "waterfall", "aria-label": "Where the time went" },
    ...phases.map((phase) => {
      const bar = h("i", { class: `k-${phase.kind}` });
      bar.style.left = `${(100 * phase.from) / total}%`;
      bar.style.width = `${(100 * (phase.to - phase.from)) / total}%`;
      const mark = target === null ? null : h("u", { title: `target of its class for the first token: ${round(target)}` });
      if (mark) mark.style.left = `${(100 * target) / total}%`;
      return h(
        "li",
        { "data-phase": phase.kind, title: phase.detail || null },
        h("span", { class: "name", text: phase.name }),
        h("span", { class: "lane" }, mark, bar),
        h("span", { class: "n", text: seconds(phase.to - phase.from) }),
      );
    }),
    target === null ? null : h("li", { class: "axis" }, h("span", { class: "name" }), h("span", { class: "note", text: `dashed: target for the first token, ${round(target)}` })),
  );
}

/** Why attempts failed: in words, because only a mouse finds what a bar is called. */
function failureWords(phases) {
  return phases.filter((phase) => phase.kind === "bad" && phase.detail).map((phase) => h("p", { class: "demand" }, h("b", { text: phase.name }), `: ${phase.detail}`));
}

function cachedWords(record) {
  const usage = record.usage;
  if (!usage?.cached_tokens) return null;
  return h("p", { class: "note", text: `${record.backend} found ${number(usage.cached_tokens)} of ${number(usage.prompt_tokens)} prompt tokens in its prefix cache.` });
}

function placedWords(record) {
  const placed = record.placed;
  const had = record.decision?.candidates.find((one) => one.backend === placed?.backend);
  if (!placed || !had || had.excluded === null) return null;
  const free = record.decision.candidates.find((one) => one.excluded === null);
  const saved = placed.scores.prefill_saved_s ?? 0;
  const stayed = free && saved > 0 && record.attempts.length === 1 ? ` ${free.backend} had room before, but ${placed.backend} has its conversation, which saved ${seconds(saved)} of prefill.` : "";
  return h("p", { class: "note", text: `When its turn came, ${placed.backend} had ${number(placed.load.seqs)} of ${number(placed.knee_seqs)} in flight${placed.detail ? ` (${placed.detail})` : ""}.${stayed}` });
}
