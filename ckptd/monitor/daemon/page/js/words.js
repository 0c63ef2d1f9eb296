// Words and shapes of states, in one place. A state has a colour, a shape and a word: never one alone.

import { svg } from "./dom.js";
import { store } from "./store.js";

/** Order is the `status` number of the API. */
export const STATUSES = [
  { key: "ok", word: "ok", says: "makes progress" },
  { key: "waiting", word: "waiting", says: "waits for another rank" },
  { key: "suspect", word: "suspect", says: "a suspect of an open incident" },
  { key: "dead", word: "dead", says: "its process has ended" },
  { key: "silent", word: "silent", says: "its agent does not report" },
  { key: "slow", word: "slow", says: "slower than its like" },
];
/** Most telling first. */
export const BY_WEIGHT = [3, 2, 5, 4, 1, 0];

export const statusOf = (number) => STATUSES[number] ?? STATUSES[4];

export const JOB_STATES = {
  waiting: { word: "waiting for ranks", title: "Waiting", status: 4 },
  ok: { word: "no incident", title: "Healthy", status: 0 },
  incident: { word: "incident", title: "Incident", status: 2 },
};

/** Without a connection nobody knows how the job is: what it was is no state. */
export const LOST = { word: "connection lost", title: "Not known", status: 4 };
export const stateOf = (job) => (store.connection.state === "lost" ? LOST : JOB_STATES[job.state] ?? JOB_STATES.waiting);

const SHAPES = {
  ok: () => [svg("circle", { cx: 6, cy: 6, r: 4, class: "fill" })],
  waiting: () => [svg("circle", { cx: 6, cy: 6, r: 3.6, class: "line" }), svg("path", { d: "M6 3.8V6l1.6 1", class: "line" })],
  suspect: () => [svg("path", { d: "M6 1.2 11.2 10.6H.8Z", class: "fill" })],
  dead: () => [svg("path", { d: "M2 2l8 8M10 2l-8 8", class: "line thick" })],
  silent: () => [svg("circle", { cx: 6, cy: 6, r: 4, class: "line dashed" })],
  slow: () => [svg("rect", { x: 1, y: 4, width: 10, height: 4, rx: 1, class: "fill" })],
};

export function shape(status) {
  const { key } = statusOf(status);
  return svg("svg", { viewBox: "0 0 12 12", class: `shape s-${key}`, "aria-hidden": "true" }, SHAPES[key]());
}

/** What the kernel's letters mean. */
export const PROCESS = {
  R: "running", S: "sleeping", D: "in uninterruptible sleep", T: "stopped", t: "traced", Z: "ended, not collected", X: "ended",
};

const paths = {
  overview: "M2 2h5v5H2zM9 2h5v3H9zM9 7h5v7H9zM2 9h5v5H2z",
  progress: "M2 2v12h12M4.500 10.500 7 7l2.500 2L14 3.500",
  ranks: "M2 2h3v3H2zM6.5 2h3v3h-3zM11 2h3v3h-3zM2 6.5h3v3H2zM6.5 6.5h3v3h-3zM11 6.5h3v3h-3zM2 11h3v3H2zM6.5 11h3v3h-3zM11 11h3v3h-3z",
  incidents: "M8 2 14.5 13.5H1.5ZM8 6.5v3.2M8 11.4v.6",
  links: "M4 4m-2 0a2 2 0 1 0 4 0a2 2 0 1 0-4 0M12 12m-2 0a2 2 0 1 0 4 0a2 2 0 1 0-4 0M12 4m-2 0a2 2 0 1 0 4 0a2 2 0 1 0-4 0M6 4h4M12 6v4M5.5 5.5l5 5",
  calls: "M2 3h6M5 6.5h7M4 10h5M8 13.5h6",
  checkpoints: "M2.5 4.5C2.5 3 5 2 8 2s5.500 1 5.500 2.500S11 7 8 7 2.500 6 2.500 4.500ZM2.500 4.500v7C2.500 13 5 14 8 14s5.500-1 5.500-2.500v-7M2.500 8c0 1.500 2.500 2.500 5.500 2.500s5.500-1 5.500-2.500",
  elastic: "M13.500 8a5.500 5.500 0 1 1-1.800-4.100M13.500 2v3h-3M8 5v3l2 1.500",
};
export function icon(name) {
  return svg("svg", { viewBox: "0 0 16 16", class: "icon", "aria-hidden": "true" }, svg("path", { d: paths[name] }));
}
