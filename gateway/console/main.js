// Follows the gateway, and hands what it says to the parts of the page.

import { NO_ANSWER, ask, at, h, keyed, learnClasses, number, say, timeOfDay } from "./dom.js";
import { showFleet } from "./fleet.js";
import { showFlow } from "./flow.js";
import { followJobs, leaveJobs } from "./jobs.js";
import { showLatency } from "./latency.js";
import { forgetRequests, renameClasses, startRequests, takeRequests } from "./requests.js";
import { showWaiting } from "./waiting.js";
import { askAbout, startWhatIf } from "./whatif.js";

const AGAIN_MS = 3000; // after a refusal
const STALE_MS = 4000; // a gateway says something each second
const DEAD_MS = 10_000; // a connection can end without a word to the browser, as when a laptop has slept
const ALARMING = new Set(["store", "gateway"]);

let events = null;
let heardAt = 0; // when it was connected, or has last said something
let shownAt = 0; // by the gateway, whose clock may be another

function link(state, text) {
  at("link").dataset.state = state;
  say(at("link"), text);
}

/** What is shown is old: says why, and from when it is. */
function away(why = NO_ANSWER) {
  link("away", shownAt ? `${why} (last heard at ${timeOfDay(shownAt)})` : why);
}

function showFacts(snapshot) {
  const facts = [
    ["policy", snapshot.policy],
    ["version", snapshot.gateway],
    ["ended", number(snapshot.ended)],
  ];
  // Of several, each shows only the requests that it has served itself.
  if (snapshot.owner && snapshot.replicas > 1) facts.push(["requests of", `${snapshot.owner}, one of ${number(snapshot.replicas)}`]);
  else if (snapshot.owner) facts.push(["process", snapshot.owner]);
  if (snapshot.store === "alone") facts.push(["store", "no answer, counts alone"]);
  if (snapshot.is_leaving) facts.push(["gateway", "about to stop"]);
  keyed(at("facts"), facts, ([name]) => name, ([name]) => h("div", { class: ALARMING.has(name) ? "attention" : null }, h("dt", { text: name }), h("dd")), (element, [, value]) => say(element.lastElementChild, value));
}

function follow() {
  events?.close();
  heardAt = performance.now();
  events = new EventSource("admin/live");
  events.addEventListener("open", () => {
    forgetRequests();
    followJobs();
  });
  events.addEventListener("snapshot", (event) => {
    const snapshot = JSON.parse(event.data);
    heardAt = performance.now();
    shownAt = snapshot.at;
    link("live", "live");
    if (learnClasses(snapshot.waiting.classes)) renameClasses();
    showFacts(snapshot);
    showFleet(snapshot);
    showWaiting(snapshot.waiting);
  });
  events.addEventListener("history", (event) => {
    const history = JSON.parse(event.data);
    showFlow(history);
    showLatency(history);
  });
  events.addEventListener("ended", (event) => takeRequests(JSON.parse(event.data).requests));
  events.addEventListener("error", failed);
}

/** Asks again to learn why: of a stream, a browser says only that there is none. */
async function failed() {
  const refused = events;
  refused.close();
  const why = await ask("admin/live").then(
    (said) => (/^(event:|$)/.test(said) ? NO_ANSWER : "what answers is not the gateway"), // a gateway that stops ends it
    (problem) => problem.message,
  );
  if (events === refused) away(why);
}

/** Connects again: to who refused, soon; on a connection that may be dead, later. */
function check() {
  if (document.hidden) return;
  const silent_ms = performance.now() - heardAt;
  if (silent_ms > STALE_MS) away();
  if (silent_ms > (events.readyState === EventSource.CLOSED ? AGAIN_MS : DEAD_MS)) follow();
}

/** Follows only while it is seen: a browser has six connections to a gateway, for all of its tabs. */
function turned() {
  if (document.hidden) {
    events?.close();
    leaveJobs();
  } else {
    link("connecting", "connecting");
    follow();
  }
}

startRequests({ onWhatIf: askAbout });
startWhatIf();
document.addEventListener("visibilitychange", turned);
setInterval(check, 1000);
turned();
