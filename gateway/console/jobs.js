// Jobs, with what an operator may do to them.

import { ask, at, h, number, say, seconds, timeOfDay, words } from "./dom.js";

const LOOK_MS = 3000;
const AGAIN = new Set(["failed", "cancelled"]);
const OPEN = new Set(["queued", "in_progress"]);
let unanswered = ""; // what was said of the last look, if it failed

export async function startJobs() {
  if (await look()) setInterval(look, LOOK_MS);
}

/** Shows the queue as it stands; false where there are no jobs at all. */
async function look() {
  let view;
  try {
    view = await ask("admin/jobs?limit=30");
  } catch (error) {
    if (error.status === 404) return false;
    unanswered = error.message;
    say(at("job-message"), unanswered);
    return true;
  }
  if (unanswered && at("job-message").textContent === unanswered) say(at("job-message"), "");
  unanswered = "";
  at("jobs").hidden = false;
  document.querySelector('nav a[href="#jobs"]').hidden = false;
  show(view);
  return true;
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
  // What is focused is found again: the list is drawn anew.
  const focused = document.activeElement?.closest("#job-list [data-action]");
  const where = focused && [focused.dataset.action, focused.closest("[data-job]").dataset.job];
  list.replaceChildren(
    h(
      "table",
      {},
      h("thead", {}, h("tr", {}, ...["since", "job", "lane", "key", "status", "attempts", "age", ""].map((name, index) => h("th", { scope: "col", class: index === 5 || index === 6 ? "n" : null, text: name })))),
      h("tbody", {}, ...view.jobs.map(row)),
    ),
  );
  if (where) list.querySelector(`[data-job="${CSS.escape(where[1])}"] [data-action="${where[0]}"]`)?.focus();
}

function row(job) {
  const status = words(job.status) + (job.position === null ? "" : `, position ${number(job.position)}`);
  return h(
    "tr",
    { "data-job": job.id, "data-status": job.status },
    h("td", { text: timeOfDay(job.created_at) }),
    h("td", { class: "id", text: job.id, title: job.id }),
    h("td", { text: job.lane }),
    h("td", { text: job.key ?? "–" }),
    h("td", { class: `status ${job.status}`, text: status, title: job.error ? `${job.error.code}: ${job.error.message}` : null }),
    h("td", { class: "n", text: number(job.attempts) }),
    h("td", { class: "n", text: seconds(job.total_s) }),
    h("td", { class: "n" }, OPEN.has(job.status) ? action("cancel", job.id) : null, AGAIN.has(job.status) ? action("retry", job.id) : null),
  );
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
