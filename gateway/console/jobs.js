// Jobs, with what an operator may do to them.

import { ask, at, h, keyed, number, say, seconds, timeOfDay, words } from "./dom.js";

const LOOK_MS = 3000;
const AGAIN = new Set(["failed", "cancelled"]);
const OPEN = new Set(["queued", "in_progress"]);
let timer = 0;
let begun = 0; // looks
let newest = 0; // of those that were answered: an older answer that comes after it is of no use
let unanswered = ""; // what was said of the last look, if it failed

/** Follows the jobs of the gateway that answers now: the one before it may have had none, or some. */
export async function followJobs() {
  clearInterval(timer);
  timer = setInterval(look, LOOK_MS);
  await look();
}

/** Until they are followed again. */
export const leaveJobs = () => clearInterval(timer);

async function look() {
  const turn = (begun += 1);
  const [view, error] = await ask("admin/jobs?limit=30").then((found) => [found, null], (problem) => [null, problem]);
  if (turn < newest) return;
  newest = turn;
  if (error) {
    const hasNone = error.status === 404;
    if (hasNone) clearInterval(timer);
    if (error.status) unveil(!hasNone);
    unanswered = error.message;
    say(at("job-message"), unanswered);
    return;
  }
  if (unanswered && at("job-message").textContent === unanswered) say(at("job-message"), "");
  unanswered = "";
  unveil(true);
  show(view);
}

function unveil(isSeen) {
  at("jobs").hidden = !isSeen;
  document.querySelector('nav a[href="#jobs"]').hidden = !isSeen;
}

function show(view) {
  const lanes = view.lanes.map((lane) => {
    const wait = lane.queued ? `, oldest ${seconds(lane.oldest_wait_s)}` : "";
    return `${lane.lane}: ${number(lane.queued)} queued, ${number(lane.in_progress)} in progress${wait}`;
  });
  say(at("job-lanes"), [...(view.drained ? ["drained: workers take no jobs"] : []), ...lanes].join(" · "));
  const list = at("job-list");
  list.classList.toggle("empty", !view.jobs.length);
  if (!view.jobs.length) {
    say(list, "There are no jobs.");
    return;
  }
  if (!list.firstElementChild) {
    const names = ["since", "job", "lane", "key", "status", "attempts", "age", ""];
    const heads = names.map((name, index) => h("th", { scope: "col", class: index === 5 || index === 6 ? "n" : null, text: name }));
    list.replaceChildren(h("table", {}, h("thead", {}, h("tr", {}, ...heads)), h("tbody")));
  }
  keyed(list.querySelector("tbody"), view.jobs, (job) => job.id, row, update);
}

function row(job) {
  return h(
    "tr",
    { "data-job": job.id },
    h("td", { text: timeOfDay(job.created_at) }),
    h("td", { class: "id", text: job.id, title: job.id }),
    h("td", { class: "name", text: job.lane }),
    h("td", { class: "name", text: job.key ?? "–" }),
    h("td"),
    h("td", { class: "n" }),
    h("td", { class: "n" }),
    h("td", { class: "n" }),
  );
}

function update(element, job) {
  const [status, attempts, age, actions] = [...element.cells].slice(4);
  element.dataset.status = job.status;
  status.className = `status ${job.status}`;
  status.title = job.error ? `${job.error.code}: ${job.error.message}` : (job.setback ?? "");
  say(status, words(job.status) + (job.position === null ? "" : `, position ${number(job.position)}`));
  say(attempts, number(job.attempts));
  say(age, seconds(job.total_s));
  const possible = OPEN.has(job.status) ? "cancel" : AGAIN.has(job.status) ? "retry" : "";
  const button = actions.firstElementChild;
  if ((button?.dataset.action ?? "") === possible) return;
  actions.replaceChildren(...(possible ? [action(possible, job.id)] : []));
}

function action(name, id) {
  return h("button", { type: "button", "data-action": name, "aria-label": `${name} ${id}`, text: name, onclick: () => act(name, id) });
}

async function act(name, id) {
  try {
    const job = await ask(`admin/jobs/${encodeURIComponent(id)}/${name}`, { method: "POST" });
    say(at("job-message"), `${id} is ${words(job.status)}.`);
  } catch (error) {
    say(at("job-message"), `${name}: ${error.message}`);
  }
  await look();
}
