// What went where: classes at the left, backends at the right, as wide as there were requests.

import { FINE, at, colourOf, number, s, say, words } from "./dom.js";

const WIDTH = 620;
const NODE = 8;
const MARGIN = NODE + 9; // of a name, from its end of the ribbons
const LETTER = 7.9; // how wide one is, where they are wide
const NAME = 24; // letters in a line; what is longer goes on in the line of the figure
const GAP = 10;
const LABEL = 26; // what a name with its figure needs
const NOWHERE = "not served";
const WITHOUT_BACKEND = { replayed: "replayed", handed_over: "submitted as job", left: "caller left" };

export function showFlow(history) {
  const place = at("flow-chart");
  if (!history.flows.length) {
    if (!place.classList.contains("empty")) say(place, `No request has ended in the last ${Math.round(history.flow_s / 60)} minutes.`);
    place.classList.add("empty");
    return;
  }
  const links = joined(history.flows);
  const sources = side(links, (link) => link.from);
  const targets = side(links, (link) => link.to);
  const most = Math.max(sources.length, targets.length);
  const height = Math.max(250, (LABEL + GAP) * most + 20);
  const unit = Math.min(unitOf(sources, height), unitOf(targets, height));
  placed(sources, unit, height);
  placed(targets, unit, height);
  const left = namesRoom(sources);
  const right = WIDTH - namesRoom(targets);
  place.classList.remove("empty");
  place.replaceChildren(
    s(
      "svg",
      { viewBox: `0 0 ${WIDTH} ${height}`, role: "img", "aria-label": spoken(links, history.flow_s) },
      ...links.map((link) => ribbon(link, sources, targets, unit, left, right)),
      ...sources.map((node) => nodeMarks(node, left - NODE, "end", left - MARGIN, node.of)),
      ...targets.map((node) => nodeMarks(node, right, "start", right + MARGIN, null)),
    ),
  );
}

function joined(flows) {
  const models = new Set(flows.map(([flow]) => flow.model).filter(Boolean));
  const found = new Map();
  for (const [flow, count] of flows) {
    const from = flow.traffic_class ? (models.size > 1 ? `${flow.model} ${flow.traffic_class}` : flow.traffic_class) : "not classified";
    const to = flow.backend || (WITHOUT_BACKEND[flow.ending] ?? NOWHERE);
    const isBad = !FINE.has(flow.ending);
    const key = JSON.stringify([from, to, isBad]);
    const link = found.get(key) ?? { from, to, isBad, of: flow.traffic_class, count: 0, endings: new Map() };
    link.count += count;
    link.endings.set(flow.ending, (link.endings.get(flow.ending) ?? 0) + count);
    found.set(key, link);
  }
  return [...found.values()].sort((one, other) => one.from.localeCompare(other.from) || one.to.localeCompare(other.to) || one.isBad - other.isBad);
}

function side(links, nameOf) {
  const nodes = new Map();
  for (const link of links) {
    const name = nameOf(link);
    const node = nodes.get(name) ?? { name, count: 0, of: link.of };
    node.count += link.count;
    nodes.set(name, node);
  }
  const last = (node) => (node.name === NOWHERE || node.name === "not classified" ? 1 : 0);
  return [...nodes.values()].sort((one, other) => last(one) - last(other) || one.name.localeCompare(other.name));
}

/** A name in two lines, the second often empty: names of one fleet begin alike, and end alike. */
function inLines(name) {
  if (name.length <= NAME) return [name, ""];
  const end = Math.max(...[..."-_. "].map((mark) => name.lastIndexOf(mark, NAME - 1) + 1)) || NAME;
  const rest = name.slice(end);
  return [name.slice(0, end), rest.length > NAME ? `…${rest.slice(1 - NAME)}` : rest];
}

/** How wide the names of a side are. */
function namesRoom(nodes) {
  const wide = (node) => Math.max(...inLines(node.name).map((line) => line.length));
  return MARGIN + LETTER * Math.max(...nodes.map(wide));
}

/** How high a request is, so that all nodes of a side have room, also for their names. */
function unitOf(nodes, height) {
  let left = height - GAP * (nodes.length - 1);
  let counted = nodes.toSorted((one, other) => one.count - other.count);
  let sum = counted.reduce((whole, node) => whole + node.count, 0);
  while (counted.length > 1 && (counted[0].count * left) / sum < LABEL) {
    left -= LABEL;
    sum -= counted[0].count;
    counted = counted.slice(1);
  }
  return left / sum;
}

function placed(nodes, unit, height) {
  const room = (node) => Math.max(LABEL, node.count * unit);
  let y = (height - nodes.reduce((sum, node) => sum + room(node), 0) - GAP * (nodes.length - 1)) / 2;
  for (const node of nodes) {
    const high = Math.max(1.5, node.count * unit);
    const top = y + (room(node) - high) / 2;
    Object.assign(node, { y: top, height: high, next: top });
    y += room(node) + GAP;
  }
}

function ribbon(link, sources, targets, unit, left, right) {
  const from = sources.find((node) => node.name === link.from);
  const to = targets.find((node) => node.name === link.to);
  const thick = Math.max(1, link.count * unit);
  const [y0, y1] = [from.next + thick / 2, to.next + thick / 2];
  from.next += link.count * unit;
  to.next += link.count * unit;
  const middle = (left + right) / 2;
  const path = s("path", { class: "ribbon", d: `M ${left} ${y0} C ${middle} ${y0} ${middle} ${y1} ${right} ${y1}`, "stroke-width": thick });
  path.style.stroke = link.isBad ? "var(--bad)" : colourOf(link.of);
  const endings = [...link.endings].map(([ending, count]) => `${number(count)} ${words(ending)}`).join(", ");
  path.append(s("title", { text: `${link.from} → ${link.to}: ${endings}` }));
  return path;
}

function nodeMarks(node, x, anchor, textX, of) {
  const mark = s("rect", { x, y: node.y, width: NODE, height: node.height, rx: 1.5 });
  mark.style.fill = node.name === NOWHERE ? "var(--bad)" : of === null ? "var(--muted)" : colourOf(of);
  const middle = node.y + node.height / 2;
  const [first, second] = inLines(node.name);
  return s(
    "g",
    { class: "node" },
    s("title", { text: node.name }),
    mark,
    s("text", { x: textX, y: middle - 1, "text-anchor": anchor, text: first }),
    s("text", { x: textX, y: middle + 12, "text-anchor": anchor, class: "quiet", text: `${second} ${number(node.count)}`.trim() }),
  );
}

function spoken(links, span) {
  const told = links.map((link) => `${number(link.count)} from ${link.from} to ${link.to}${link.isBad ? ", failed" : ""}`);
  return `Requests of the last ${Math.round(span / 60)} minutes: ${told.join("; ")}`;
}
