// Who waits, for how long, and until when they may.

import { at, colourOf, h, number, say, seconds } from "./dom.js";

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
  const left = waiting.total - waiting.line.length;
  place.replaceChildren(
    h(
      "table",
      {},
      h("thead", {}, h("tr", {}, ...["", "class", "key", "prompt", "due in", "waited"].map((name, index) => h("th", { scope: "col", class: [0, 3, 4].includes(index) ? "n" : null, text: name })))),
      h("tbody", {}, ...waiting.line.map((one) => row(one, limits.get(`${one.model}/${one.traffic_class}`)))),
    ),
    ...(left > 0 ? [h("p", { class: "note", text: `and ${number(left)} more` })] : []),
  );
}

function summary(one) {
  const rate = one.drain_per_s ? `, ${one.drain_per_s.toFixed(one.drain_per_s < 10 ? 1 : 0)} slots/s` : "";
  return h("span", { class: "pill" }, swatch(one.class), `${one.class} ${number(one.waiting)}${rate}`);
}

export function swatch(name) {
  const mark = h("i", { class: "swatch" });
  mark.style.background = colourOf(name);
  return mark;
}

function row(one, limit) {
  const bar = h("i");
  // A job waits for as long as it takes: its limit is not a number.
  bar.style.width = limit ? `${Math.min(100, (100 * one.waited_s) / limit)}%` : "0";
  return h(
    "tr",
    { "data-request": one.id, title: `${one.id}; first choice: pool ${one.pool}` },
    h("td", { class: "n", text: number(one.position) }),
    h("td", {}, swatch(one.traffic_class), one.traffic_class, one.is_behind ? h("em", { text: " behind" }) : null, one.tries ? h("em", { text: " retry" }) : null, one.stays_for ? h("em", { text: ` stays for ${one.stays_for}` }) : null),
    h("td", { text: one.key ?? "–" }),
    h("td", { class: "n", text: number(one.prompt_tokens) }),
    h("td", { class: one.due_in_s < 0 ? "n attention" : "n", text: seconds(one.due_in_s) }),
    h("td", { class: "waited" }, h("span", { class: "bar" }, bar), h("span", { class: "value", text: seconds(one.waited_s) })),
  );
}
