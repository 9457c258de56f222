// Who waits, for how long, and until when they may.

import { at, classWords, colourOf, h, keyed, number, say, seconds } from "./dom.js";

export function showWaiting(waiting) {
  const limits = new Map(waiting.classes.map((one) => [`${one.model}/${one.class}`, one.max_wait_s]));
  const busy = waiting.classes.filter((one) => one.waiting);
  at("waiting-classes").replaceChildren(...busy.map(summary));
  const place = at("waiting-line");
  place.classList.toggle("empty", !waiting.line.length);
  if (!waiting.line.length) {
    say(place, "No request is waiting.");
    return;
  }
  if (!place.firstElementChild) {
    const names = ["", "class", "key", "prompt", "due in", "waited"];
    const heads = names.map((name, index) => h("th", { scope: "col", class: [0, 3, 4].includes(index) ? "n" : null, text: name }));
    place.replaceChildren(h("table", {}, h("thead", {}, h("tr", {}, ...heads)), h("tbody")), h("p", { class: "note" }));
  }
  keyed(place.querySelector("tbody"), waiting.line, (one) => one.id, row, (element, one) => update(element, one, limits.get(`${one.model}/${one.traffic_class}`)));
  const left = waiting.total - waiting.line.length;
  say(place.querySelector(".note"), left > 0 ? `and ${number(left)} more` : "");
}

function summary(one) {
  const rate = one.drain_per_s ? `, ${one.drain_per_s.toFixed(one.drain_per_s < 10 ? 1 : 0)} slots/s` : "";
  return h("span", { class: "pill" }, swatch(one.class), `${classWords(one.model, one.class)} ${number(one.waiting)}${rate}`);
}

export function swatch(name) {
  const mark = h("i", { class: "swatch" });
  mark.style.background = colourOf(name);
  return mark;
}

function row(one) {
  return h(
    "tr",
    { "data-request": one.id, title: `${one.id}; first choice: pool ${one.pool}` },
    h("td", { class: "n" }),
    h("td", {}, swatch(one.traffic_class), classWords(one.model, one.traffic_class), h("em")),
    h("td", { text: one.key ?? "–" }),
    h("td", { class: "n", text: number(one.prompt_tokens) }),
    h("td"),
    h("td", { class: "waited" }, h("span", { class: "bar" }, h("i")), h("span", { class: "value" })),
  );
}

function update(element, one, limit) {
  const [position, , , , due, waited] = element.cells;
  say(position, number(one.position));
  say(element.querySelector("em"), [one.is_behind ? " behind" : "", one.tries ? " retry" : "", one.stays_for ? ` stays for ${one.stays_for}` : ""].join(""));
  due.className = one.due_in_s < 0 ? "n attention" : "n";
  say(due, seconds(one.due_in_s));
  // A job waits for as long as it takes: its limit is not a number.
  waited.querySelector("i").style.width = limit ? `${Math.min(100, (100 * one.waited_s) / limit)}%` : "0";
  say(waited.querySelector(".value"), seconds(one.waited_s));
}
