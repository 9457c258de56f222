// TTFT and TPOT of each backend as lines: the same scale for all of them.

import { at, h, keyed, round, s, say, seconds } from "./dom.js";

const WIDTH = 250;
const HEIGHT = 46;
const TICKS = [0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000];

export function showLatency(history) {
  const place = at("latency-charts");
  const names = Object.keys(history.lines);
  if (!names.length) {
    if (!place.classList.contains("empty")) say(place, "No stream has ended lately.");
    place.classList.add("empty");
    return;
  }
  if (place.classList.contains("empty")) {
    place.classList.remove("empty");
    place.replaceChildren(
      h("div", { class: "lines head" }, h("span"), h("span", { text: "TTFT, as callers see it" }), h("span", { text: "TPOT" })),
      h("div", { class: "rows" }),
    );
  }
  const scales = { ttft: scale(history, "ttft"), tpot: scale(history, "tpot") };
  keyed(place.querySelector(".rows"), names, (name) => name, row, (element, name) => {
    const lines = history.lines[name];
    for (const kind of ["ttft", "tpot"]) {
      const cell = element.querySelector(`.${kind}`);
      const [p50, p95] = [lines[`${kind}_p50`], lines[`${kind}_p95`]];
      cell.querySelector("svg").replaceChildren(...drawn(p50, p95, scales[kind]));
      say(cell.querySelector(".most"), scales[kind] ? round(scales[kind].most) : "");
      say(cell.querySelector(".least"), scales[kind] ? round(scales[kind].least) : "");
      const last = lastOf(p50);
      const isOld = last >= 0 && last < p50.length - 1;
      cell.classList.toggle("old", isOld);
      say(cell.querySelector(".p50"), last < 0 ? "–" : seconds(p50[last]));
      say(cell.querySelector(".p95"), last < 0 ? "" : seconds(p95[last]));
      cell.querySelector("svg").setAttribute("aria-label", last < 0 ? "no data yet" : `median ${seconds(p50[last])}, 95th percentile ${seconds(p95[last])}`);
    }
  });
}

function row(name) {
  const cell = (kind) =>
    h(
      "div",
      { class: `chart ${kind}` },
      h("div", { class: "scale", "aria-hidden": "true" }, h("span", { class: "most" }), h("span", { class: "least" })),
      s("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" }),
      h("div", { class: "figures" }, h("span", { class: "p50", title: "median" }), h("span", { class: "p95", title: "95th percentile" })),
    );
  return h("div", { class: "lines", "data-lines": name }, h("strong", { text: name }), cell("ttft"), cell("tpot"));
}

function lastOf(points) {
  for (let index = points.length - 1; index >= 0; index -= 1) if (points[index] !== null) return index;
  return -1;
}

/** A logarithmic scale, from a tick below the fastest to one above the slowest. */
function scale(history, kind) {
  const values = Object.values(history.lines).flatMap((lines) => [...lines[`${kind}_p50`], ...lines[`${kind}_p95`]]).filter((value) => value !== null);
  if (!values.length) return null;
  const least = TICKS.findLast((tick) => tick <= Math.min(...values)) ?? TICKS[0];
  const most = TICKS.find((tick) => tick >= Math.max(...values)) ?? TICKS.at(-1);
  const span = Math.log(Math.max(most, 3 * least) / least);
  const y = (value) => HEIGHT - 3 - ((HEIGHT - 6) * Math.log(Math.max(value, least) / least)) / span;
  const decades = TICKS.filter((tick) => tick > least && tick < most && Math.log10(tick) % 1 === 0);
  return { y, ticks: [least, ...decades, most], least, most };
}

function drawn(p50, p95, scaled) {
  if (!scaled) return [];
  const x = (index) => (WIDTH * index) / (p50.length - 1);
  const marks = scaled.ticks.map((tick) => {
    const line = s("line", { x1: 0, x2: WIDTH, y1: scaled.y(tick), y2: scaled.y(tick), class: "grid" });
    line.append(s("title", { text: round(tick) }));
    return line;
  });
  for (const [from, to] of runs(p50)) {
    const indexes = Array.from({ length: to - from + 1 }, (_, step) => from + step);
    // One point alone is drawn as wide as the time it speaks for.
    const points = (line) => indexes.flatMap((index) => (from === to ? [[x(index) - 3, line[index]], [x(index), line[index]]] : [[x(index), line[index]]]));
    const [low, high] = [points(p50), points(p95)];
    const written = (list) => list.map(([px, value]) => `${px.toFixed(1)},${scaled.y(value).toFixed(1)}`).join(" ");
    marks.push(s("polygon", { class: "between", points: `${written(low)} ${written(high.toReversed())}` }));
    marks.push(s("polyline", { class: "edge", points: written(high) }));
    marks.push(s("polyline", { class: "half", points: written(low) }));
  }
  return marks;
}

/** Where points follow each other without a gap. */
function runs(points) {
  const found = [];
  points.forEach((value, index) => {
    if (value === null) return;
    const last = found.at(-1);
    if (last && last[1] === index - 1) last[1] = index;
    else found.push([index, index]);
  });
  return found;
}
