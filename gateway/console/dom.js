// Elements, and figures as people read them.

const SVG = "http://www.w3.org/2000/svg";

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "text") element.textContent = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export const h = (name, attributes = {}, ...children) =>
  filled(document.createElement(name), attributes, children);

export const s = (name, attributes = {}, ...children) =>
  filled(document.createElementNS(SVG, name), attributes, children);

export const at = (id) => document.getElementById(id);

/** Sets text only where it differs, so that a selection of it survives. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Makes the children of `parent` those of `items`, in order; one that stays keeps its element. */
export function keyed(parent, items, keyOf, create, update) {
  const old = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  const wanted = new Set(items.map((item) => String(keyOf(item))));
  // First, so that none of those that stay is moved: what is moved loses the focus, and a click on it is lost.
  for (const [key, child] of old) if (!wanted.has(key)) child.remove();
  let before = parent.firstElementChild;
  for (const item of items) {
    const key = String(keyOf(item));
    let child = old.get(key);
    if (!child) {
      child = create(item);
      child.dataset.key = key;
    }
    if (child === before) before = before.nextElementSibling;
    else parent.insertBefore(child, before);
    if (update) update(child, item);
  }
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 0) return `−${seconds(-value)}`;
  if (value < 0.0095) return `${(1000 * value).toFixed(1)} ms`;
  if (value < 0.9995) return `${Math.round(1000 * value)} ms`;
  if (value < 9.95) return `${value.toFixed(1)} s`;
  if (value < 99.5) return `${Math.round(value)} s`;
  return clock(value);
}

/** A round figure: of a scale, or one that somebody has set. */
export function round(value) {
  if (value >= 60) return value % 60 ? clock(value) : `${value / 60} min`;
  return value < 1 ? `${Number((1000 * value).toPrecision(3))} ms` : `${Number(value.toPrecision(3))} s`;
}

/** Minutes and seconds, or hours and minutes. */
export function clock(value) {
  const whole = Math.max(0, Math.round(value));
  if (whole < 3600) return `${Math.floor(whole / 60)}:${String(whole % 60).padStart(2, "0")}`;
  return `${Math.floor(whole / 3600)} h ${String(Math.floor((whole % 3600) / 60)).padStart(2, "0")}`;
}

export const number = (value) =>
  value === null || value === undefined ? "–" : Math.round(value).toLocaleString("en").replaceAll(",", "\u2009");

/** A share as a width. */
export const width = (share) => `${(100 * Math.min(1, Math.max(0, share))).toFixed(2)}%`;

export const percent = (share) => `${Math.round(100 * share)} %`;

export const words = (name) => name.replaceAll("_", " ");

export function timeOfDay(epoch) {
  const when = new Date(1000 * epoch);
  const two = (part) => String(part).padStart(2, "0");
  return `${two(when.getHours())}:${two(when.getMinutes())}:${two(when.getSeconds())}`;
}

export const NO_ANSWER = "the gateway does not answer";
const PATIENCE_MS = { look: 10_000, act: 60_000 };

/** Asks the admin port. Throws an Error whose message is what it answers, or that it does not. */
export async function ask(path, options = {}) {
  const signal = AbortSignal.timeout(options.method ? PATIENCE_MS.act : PATIENCE_MS.look);
  let answer, text;
  try {
    answer = await fetch(path, { cache: "no-store", redirect: "manual", signal, ...options });
    text = await answer.text();
  } catch {
    throw new Error(NO_ANSWER); // each browser has other words for it
  }
  if (answer.ok) return answer.headers.get("content-type")?.includes("json") ? JSON.parse(text) : text;
  // The gateway redirects nowhere; what stands before it does, to have somebody log in.
  let message = answer.type === "opaqueredirect" ? "redirected: load this page again" : `${answer.status} ${answer.statusText}`;
  try {
    message = JSON.parse(text).error.message;
  } catch {
    // not one of the gateway's own answers
  }
  throw Object.assign(new Error(message), { status: answer.status });
}

/** Endings that are nobody's failure. */
export const FINE = new Set(["completed", "replayed", "handed_over", "left"]);

let shared = new Set(); // names of classes that several models have

/** Takes in the classes of all models; true if some are called otherwise than before. */
export function learnClasses(all) {
  const names = all.map((one) => one.class);
  const before = [...shared].join();
  shared = new Set(names.filter((name, index) => names.indexOf(name) !== index).sort());
  return [...shared].join() !== before;
}

/** How a class is called: with its model where the name alone could mean two. */
export const classWords = (model, name) => (shared.has(name) ? `${model} ${name}` : name);

const COLOURS = 6;
const classes = [];

/** The colour of a class: the same everywhere on the page, as long as it is open. */
export function colourOf(name) {
  if (!name) return "var(--idle)";
  if (!classes.includes(name)) classes.push(name);
  return `var(--class-${(classes.indexOf(name) % COLOURS) + 1})`;
}
