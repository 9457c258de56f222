// Follows the gateway, and hands what it says to the parts of the page.

import { at, h, keyed, learnClasses, number, say, timeOfDay } from "./dom.js";
import { showFleet } from "./fleet.js";
import { showFlow } from "./flow.js";
import { followJobs } from "./jobs.js";
import { showLatency } from "./latency.js";
import { forgetRequests, renameClasses, startRequests, takeRequests } from "./requests.js";
import { showWaiting } from "./waiting.js";
import { askAbout, startWhatIf } from "./whatif.js";

const AGAIN_MS = 3000;
const STALE_MS = 4000;

let heardAt = 0;
let shownAt = 0;

function link(state, text) {
  at("link").dataset.state = state;
  say(at("link"), text);
}

/** What is shown is old: says from when. */
function away() {
  link("away", shownAt ? `no answer since ${timeOfDay(shownAt)}` : "no answer");
}

function showFacts(snapshot) {
  const facts = [
    ["policy", snapshot.policy],
    ["version", snapshot.gateway],
    ["ended", number(snapshot.ended)],
  ];
  const several = snapshot.replicas > 1 ? `, 1 of ${number(snapshot.replicas)}` : "";
  if (snapshot.owner) facts.push(["process", snapshot.owner + several]);
  if (snapshot.store === "alone") facts.push(["store", "no answer, counts alone"]);
  keyed(at("facts"), facts, ([name]) => name, ([name]) => h("div", { class: name === "store" ? "attention" : null }, h("dt", { text: name }), h("dd")), (element, [, value]) => say(element.lastElementChild, value));
}

function follow() {
  const events = new EventSource("admin/live");
  events.addEventListener("open", () => {
    forgetRequests();
    followJobs();
  });
  events.addEventListener("snapshot", (event) => {
    const snapshot = JSON.parse(event.data);
    heardAt = performance.now();
    shownAt = Date.now() / 1000;
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
  events.addEventListener("error", () => {
    away();
    if (events.readyState === EventSource.CLOSED) setTimeout(follow, AGAIN_MS);
  });
}

setInterval(() => {
  if (heardAt && performance.now() - heardAt > STALE_MS) away();
}, 1000);

startRequests({ onWhatIf: askAbout });
startWhatIf();
follow();
