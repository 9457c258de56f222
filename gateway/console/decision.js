// A decision as a picture: every candidate, its score by parts, or the reason it is excluded.

import { h, number, percent, words } from "./dom.js";

const WHOLE = 1_000_000;
const PARTS = [
  ["spare_knee", "spare knee"],
  ["speed", "speed"],
  ["prefix_affinity", "affinity"],
  ["prefill_saved_s", "prefill saved, s"],
  ["slow_context", "slow context"],
];
const RARE = new Set(["prefill_saved_s", "slow_context"]);

/** The candidates, best first. `chosen`: the backend that served it in the end. */
export function candidateTable(candidates, chosen = null) {
  const parts = PARTS.filter(([name]) => !RARE.has(name) || candidates.some((one) => one.scores[name]));
  const best = Math.max(0.001, ...candidates.map((one) => one.score));
  let rank = 0;
  return h(
    "table",
    { class: "candidates" },
    h(
      "thead",
      {},
      h("tr", {}, ...["", "backend", "pool"].map((name) => h("th", { scope: "col", text: name })), h("th", { scope: "col", class: "n", text: "in flight" }), h("th", { scope: "col", text: "score" }), h("th", { scope: "col", text: "parts of the score, or why excluded" })),
    ),
    h(
      "tbody",
      {},
      ...candidates.map((one) => {
        const isOut = one.excluded !== null;
        if (!isOut) rank += 1;
        return h(
          "tr",
          { class: isOut ? "out" : rank === 1 ? "first" : null, "data-candidate": one.backend, "data-excluded": one.excluded },
          h("td", { class: "n", text: isOut ? "" : String(rank) }),
          h("td", {}, h("strong", { text: one.backend }), one.backend === chosen ? h("span", { class: "tag", text: "served it" }) : null),
          h("td", {}, one.pool, one.is_spill ? h("span", { class: "tag", text: "spill" }) : null),
          h("td", { class: "n", text: `${number(one.load.seqs)} of ${number(one.knee_seqs)} (${percent(one.load.share / WHOLE)})` }),
          h("td", {}, isOut ? null : scoreBar(one.score, best)),
          h("td", {}, isOut ? h("span", {}, h("b", { class: "reason", text: words(one.excluded) }), ` ${one.detail}`) : partList(parts, one.scores), isOut || !one.detail ? null : ` ${one.detail}`),
        );
      }),
    ),
  );
}

function scoreBar(score, best) {
  const fill = h("i");
  fill.style.width = `${Math.max(0, (100 * score) / best)}%`;
  return h("span", { class: "score" }, h("span", { class: "bar" }, fill), h("span", { class: "value", text: score.toFixed(2) }));
}

function partList(parts, scores) {
  return h("span", { class: "parts" }, ...parts.map(([name, label]) => h("span", {}, `${label} `, h("b", { text: (scores[name] ?? 0).toFixed(2) }))));
}

export function classVerdicts(verdicts) {
  return h(
    "ul",
    { class: "verdicts" },
    ...verdicts.map((one) => h("li", { class: one.matched ? "matched" : null }, h("span", { class: "mark", text: one.matched ? "✓" : "·", "aria-hidden": "true" }), h("strong", { text: one.name }), ` ${one.why}`)),
  );
}

/** What is asked of a backend, in a line. */
export function demandLine(decision) {
  const { estimate, demand } = decision;
  const band = estimate.tokens_max > estimate.tokens ? `, at most ${number(estimate.tokens_max)}` : "";
  const more = [
    [demand.seqs > 1, `${number(demand.seqs)} sequences`],
    [demand.images, `${number(demand.images)} images`],
    [demand.audios, `${number(demand.audios)} audio parts`],
  ].flatMap(([is, text]) => (is ? [text] : []));
  return [`${number(estimate.tokens)} prompt tokens (${estimate.mode}${band})`, `${number(demand.total_tokens)} with output`, ...more].join(", ");
}

/** Why nobody could take it at once, in a line; "" where somebody could. */
export function nobodyWords(candidates) {
  if (candidates.some((one) => one.excluded === null)) return "";
  return candidates.map((one) => `${one.backend}: ${words(one.excluded)}`).join("; ");
}

