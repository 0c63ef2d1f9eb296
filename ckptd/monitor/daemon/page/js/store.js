// What the page knows of the job: answers of the API, kept up to date by the stream.

const COLUMNS = ["rank", "node", "pid", "alive", "exit_code", "state", "phase", "step", "heartbeat_age_s",
  "progress_age_s", "pending_age_s", "pending", "self_s", "score", "status"];

/** The daemon tells an age again when it passes one of these, seconds: between them it only grows. */
const AGES = [1, 2, 5, 10, 30, 60, 300, Infinity];

const listeners = new Map();

/** Call `callback` after each change of one of the topics; returns what ends it. */
export function listen(topics, callback) {
  for (const topic of topics) {
    if (!listeners.has(topic)) listeners.set(topic, new Set());
    listeners.get(topic).add(callback);
  }
  return () => topics.forEach((topic) => listeners.get(topic).delete(callback));
}

const due = new Set();
let asked = false;

/** Many changes of one moment are one call of each listener, at the next frame. */
function tell(topic) {
  due.add(topic);
  if (asked) return;
  asked = true;
  // A page in the background gets no frames, and has nothing to draw.
  requestAnimationFrame(() => {
    asked = false;
    const callbacks = new Set([...due].flatMap((t) => [...(listeners.get(t) ?? [])]));
    due.clear();
    for (const callback of callbacks) callback();
  });
}

class Ranks {
  constructor() { this.clear(); }

  clear() {
    for (const name of COLUMNS) this[name] = [];
    this.at = [];
    this.nodes = [];
    this.mesh = null;
    this.rowOf = new Map();
    this.shape = 0; // counts changes of who is there, and where
  }

  get length() { return this.rank.length; }

  /** Take an answer of /ranks: all of it, or the rows that changed. */
  take(answer, whole) {
    if (whole) {
      const kept = this.shape;
      this.clear();
      this.shape = kept + 1;
    }
    if (answer.nodes?.length && answer.nodes.length !== this.nodes.length) this.shape += 1;
    if (answer.nodes?.length) this.nodes = answer.nodes;
    const n = answer.rank?.length ?? 0;
    const coords = answer.mesh?.coords;
    if (coords && !this.mesh) {
      this.mesh = { axes: answer.mesh.axes, coords: [] };
      this.shape += 1;
    }
    const present = COLUMNS.filter((name) => Array.isArray(answer[name]));
    for (let i = 0; i < n; i += 1) {
      const rank = answer.rank[i];
      let row = this.rowOf.get(rank);
      if (row === undefined) {
        row = this.length;
        this.rowOf.set(rank, row);
        this.shape += 1;
      } else if (answer.node && this.node[row] !== answer.node[i]) this.shape += 1;
      for (const name of present) this[name][row] = answer[name][i];
      this.at[row] = answer.now;
      if (coords?.[i]) this.mesh.coords[row] = coords[i];
    }
  }

  /** Forget ranks that a smaller world no longer has. */
  shrink(world) {
    if (!this.rank.some((rank) => rank >= world)) return;
    const kept = this.rank.map((_, row) => row).filter((row) => this.rank[row] < world);
    for (const name of [...COLUMNS, "at"]) this[name] = kept.map((row) => this[name][row]);
    if (this.mesh) this.mesh.coords = kept.map((row) => this.mesh.coords[row]);
    this.rowOf = new Map(this.rank.map((rank, row) => [rank, row]));
    this.shape += 1;
  }

  /** An age of a row now, in seconds; null if there is none. */
  age(name, row) {
    const value = this[name][row];
    if (value === null || value === undefined) return null;
    const grown = value + Math.max(0, store.now - this.at[row]);
    return Math.min(grown, AGES.find((limit) => value < limit));
  }

  /** Ranks of each status. */
  counts() {
    const out = [0, 0, 0, 0, 0, 0];
    for (const s of this.status) out[s] += 1;
    return out;
  }

  nodeName(row) { return this.nodes[this.node[row]] ?? "–"; }

  place(row) {
    const at = this.mesh?.coords[row];
    return at ? this.mesh.axes.map((axis, i) => `${axis} ${at[i]}`).join(" · ") : "";
  }
}

export const store = {
  job: null,
  now: 0,
  ranks: new Ranks(),
  incidents: new Map(),
  links: null,
  elastic: null,
  connection: { state: "connecting", since: Date.now() },

  setJob(job) {
    this.job = job;
    this.now = Math.max(this.now, job.now ?? 0);
    if (job.world > 0) this.ranks.shrink(job.world);
    tell("job");
  },
  setRanks(answer) {
    this.now = Math.max(this.now, answer.now ?? 0);
    this.ranks.take(answer, answer.since === null || answer.since === undefined);
    tell("ranks");
  },
  setIncidents(all) {
    this.incidents = new Map(all.map((i) => [i.id, i]));
    tell("incidents");
  },
  setIncident(incident) {
    this.incidents.set(incident.id, { ...this.incidents.get(incident.id), ...incident });
    tell("incidents");
  },
  setLinks(links) {
    this.links = links;
    tell("links");
  },
  setElastic(elastic) {
    this.elastic = elastic;
    tell("elastic");
  },
  setConnection(state) {
    if (this.connection.state === state) return;
    this.connection = { state, since: Date.now() };
    tell("connection");
  },
  /** Start over: another job, or a daemon that began anew. */
  forget() {
    this.now = 0;
    this.job = null;
    this.ranks.clear();
    this.ranks.shape += 1;
    this.incidents = new Map();
    this.links = null;
    this.elastic = null;
  },

  /** Incidents, open ones first, then the newest. */
  listed(filter = "all") {
    return [...this.incidents.values()]
      .filter((i) => filter === "all" || i.state === filter)
      .sort((a, b) => (a.state === "open" ? 0 : 1) - (b.state === "open" ? 0 : 1) || b.opened_at - a.opened_at);
  },
  get open() { return this.listed("open"); },
};
