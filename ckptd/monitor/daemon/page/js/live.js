// The stream of events: read, watched, and opened again when it breaks.

import { get, streamUrl } from "./api.js";
import { store } from "./store.js";

const FIRST_WAIT_MS = 500;
const LONGEST_WAIT_MS = 10000;
const QUIET_ROUNDS = 10;

let source = null;
let wait = FIRST_WAIT_MS;
let retry = 0;
let heard = 0;
let held = false;

/** Get what happened, then follow the stream, which begins with all that is. Called again after each break. */
export async function connect() {
  clearTimeout(retry);
  close();
  if (held) return;
  heard = performance.now();
  try {
    const [job, incidents] = await Promise.all([get("job"), get("incidents?limit=200")]);
    if (store.job && store.job.up_since !== job.up_since) store.forget();
    store.setJob(job);
    store.setIncidents(incidents.incidents ?? []);
    follow();
  } catch (error) {
    if (error.status !== 401) lost();
  }
}

/** Stop trying until `release`: there is no token. */
export function hold() { held = true; close(); clearTimeout(retry); }
export function release() { held = false; wait = FIRST_WAIT_MS; connect(); }

function follow() {
  source = new EventSource(streamUrl());
  source.onopen = () => {
    heard = performance.now();
    wait = FIRST_WAIT_MS;
    store.setConnection("live");
  };
  // EventSource would open the stream again by itself, and miss what came in between.
  source.onerror = lost;
  on("job", (data) => store.setJob(data));
  on("ranks", (data) => store.setRanks(data));
  on("incident", (data) => store.setIncident(data));
  on("links", (data) => store.setLinks(data));
  on("elastic", (data) => store.setElastic(data));
}

function on(name, take) {
  source.addEventListener(name, (event) => {
    heard = performance.now();
    store.setConnection("live");
    take(JSON.parse(event.data));
  });
}

function close() {
  source?.close();
  source = null;
}

function lost() {
  close();
  store.setConnection("lost");
  clearTimeout(retry);
  retry = setTimeout(connect, wait * (0.75 + Math.random() / 2));
  wait = Math.min(2 * wait, LONGEST_WAIT_MS);
}

// A connection that a sleeping laptop or a dead router left behind never reports an error.
setInterval(() => {
  const period = store.job?.round?.period_s ?? 1;
  const quiet = performance.now() - heard > 1000 * Math.max(10, QUIET_ROUNDS * period);
  if (source && quiet && !document.hidden) lost();
}, 2000);
addEventListener("online", connect);
document.addEventListener("visibilitychange", () => {
  if (!document.hidden && !source && !held) connect();
});
