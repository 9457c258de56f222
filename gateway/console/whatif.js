// What would be decided: about any request, now, under the policy in force or an edited one.

import { ask, at, h, number, seconds } from "./dom.js";
import { candidateTable, classVerdicts, demandLine } from "./decision.js";

const LENGTH = 2;

export function startWhatIf() {
  const form = at("question");
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    decide();
  });
  form.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      decide();
    }
  });
  for (const radio of form.querySelectorAll('[name="kind"]')) radio.addEventListener("change", () => choose(radio.value));
  at("edit").addEventListener("change", showPolicy);
  suggest();
}

async function suggest() {
  let model = "gemma-4";
  try {
    model = (await ask("admin/policy")).models[0].id;
  } catch {
    // an example is an example
  }
  const example = { model, stream: true, max_tokens: 400, messages: [{ role: "user", content: "Why is the sky blue?" }] };
  if (!at("body").value) at("body").value = JSON.stringify(example, null, LENGTH);
}

/** Fills in a past request, and decides about it. */
export function askAbout(id) {
  choose("past");
  at("past-id").value = id;
  at("whatif").scrollIntoView();
  at("past-id").focus({ preventScroll: true });
  decide();
}

function choose(kind) {
  at("question").querySelector(`[name="kind"][value="${kind}"]`).checked = true;
  for (const part of at("question").querySelectorAll("[data-for]")) part.hidden = part.dataset.for !== kind;
}

let read = "";

/** Shows the policy in force to edit, or an edit that was begun. */
async function showPolicy() {
  const box = at("policy");
  at("policy-box").hidden = !at("edit").checked;
  if (!at("edit").checked || (box.value && box.value !== read)) return;
  try {
    box.value = await ask("admin/config");
  } catch (error) {
    box.value = `# ${error.message}`;
  }
  read = box.value; // with its own line ends
}

function question() {
  const kind = at("question").querySelector('[name="kind"]:checked').value;
  if (kind === "past") return { request_id: at("past-id").value.trim() };
  const headers = {};
  for (const part of at("headers").value.split(";")) {
    const [name, ...value] = part.split(":");
    if (name.trim()) headers[name.trim()] = value.join(":").trim();
  }
  const found = { request: JSON.parse(at("body").value), headers };
  if (at("key").value.trim()) found.key = at("key").value.trim();
  return found;
}

async function decide() {
  const place = at("answers");
  let asked;
  try {
    asked = question();
  } catch (error) {
    place.replaceChildren(h("p", { class: "problem", text: `The body is not JSON: ${error.message}` }));
    return;
  }
  const both = [["Under the policy in force", asked]];
  if (at("edit").checked) both.push(["Under your edit", { ...asked, config: at("policy").value }]);
  place.setAttribute("aria-busy", "true");
  const told = await Promise.all(both.map(async ([title, body]) => [title, await answer(body)]));
  place.removeAttribute("aria-busy");
  const winners = told.map(([, found]) => winner(found));
  place.replaceChildren(
    ...(told.length > 1 ? [h("p", { class: "difference", text: difference(...winners) })] : []),
    ...told.map(([title, found], index) => shown(title, found, index)),
  );
}

async function answer(body) {
  try {
    return await ask("admin/explain", { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body) });
  } catch (error) {
    return { problem: error.message };
  }
}

function winner(found) {
  if (!found.decision) return null;
  const first = found.decision.candidates[0];
  return first && first.excluded === null ? first.backend : "";
}

function difference(before, after) {
  if (before === null || after === null) return "";
  const said = (name) => name || "no backend right now";
  return before === after ? `The same: ${said(before)}.` : `${said(before)} \u2192 ${said(after)}`;
}

function awaited(outlook) {
  if (!outlook) return "";
  const about = outlook.expected_wait_s ? `about ${seconds(outlook.expected_wait_s)}` : "";
  if (!outlook.waiting) return about && `${about} to wait`;
  return `behind ${number(outlook.waiting)} waiting request${outlook.waiting === 1 ? "" : "s"}${about && `, ${about}`}`;
}

function shown(title, found, index) {
  const attributes = { class: "answer", "data-answer": index ? "edited" : "in-force" };
  const heading = h("h3", { text: title });
  if (found.problem) return h("article", attributes, heading, h("pre", { class: "problem", text: found.problem }));
  const refused = found.refused ? h("p", { class: "problem", text: `The gateway would answer ${found.refused.status} ${found.refused.code}: ${found.refused.message}` }) : null;
  if (!found.decision) return h("article", attributes, heading, refused);
  const first = found.decision.candidates[0];
  const goes = winner(found);
  const outlook = found.outlook;
  const wait = awaited(outlook);
  return h(
    "article",
    { ...attributes, "data-winner": goes },
    heading,
    h("p", { class: "winner" }, goes ? h("strong", { text: goes }) : h("strong", { class: "attention", text: "no backend right now" }), goes ? ` pool ${first.pool}` : " ", wait ? h("span", { class: "note", text: ` ${wait}` }) : null),
    refused,
    found.changes.length ? h("ul", { class: "changes" }, ...found.changes.map((change) => h("li", { text: change }))) : null,
    h("p", { class: "demand", text: `${demandLine(found.decision)}.` }),
    classVerdicts(found.classes),
    candidateTable(found.decision.candidates),
    found.dropped.length ? h("p", { class: "note", text: `Not passed on: ${found.dropped.join(", ")}.` }) : null,
    ...found.notes.map((note) => h("p", { class: "note", text: note })),
  );
}
