// Two runs beside one another: what a step takes at the same step, and who came how far in what time.

import { get } from "../api.js";
import { h, refill, table } from "../dom.js";
import { clock, count, seconds } from "../format.js";
import { Plot, known } from "../plot.js";
import { store } from "../store.js";

const POINTS = 2000;
const ALL_S = 34560000;
/** A run ends where nothing was recorded for so long, or where steps fall to less than half and stay there. */
const APART_S = 600, BACK_S = 60;
/** Names of numbers that are a loss. */
export const LOSS = /loss|perplexity/i;

/** Runs that this daemon's folder remembers: the newest of this job first, then older ones and those of other jobs. */
export async function runsOf() {
  const { jobs } = await get("jobs");
  const own = store.job?.job;
  const all = await Promise.all(jobs.map(async (job) => split(job, await get(`history?what=step,time,self&seconds=${ALL_S}&points=${POINTS}&job=${encodeURIComponent(job)}`))));
  const mine = all.filter((_, i) => jobs[i] === own).flat(), others = all.filter((_, i) => jobs[i] !== own).flat();
  const newest = (a, b) => b.from - a.from;
  return [...mine.sort(newest), ...others.sort(newest)];
}

/** Divide what is known of a job into its runs. */
export function split(job, s) {
  const runs = [];
  let begin = 0, high = -Infinity, last = null;
  const close = (end) => { if (end > begin) runs.push(runFrom(job, s, begin, end)); begin = end; high = -Infinity; };
  s.at.forEach((at, i) => {
    const step = s.step_max[i];
    if (step === null) return;
    const fell = step < high / 2 && !s.at.some((t, k) => k > i && t - at < BACK_S && (s.step_max[k] ?? -1) >= high / 2);
    if (last !== null && (at - s.at[last] > APART_S || fell)) close(i);
    high = Math.max(high, step);
    last = i;
  });
  if (last !== null) close(s.at.length);
  return runs.filter(Boolean);
}

function runFrom(job, s, begin, end) {
  const rows = s.at.map((_, i) => i).slice(begin, end).filter((i) => s.step_max[i] !== null);
  if (rows.length < 2) return null;
  const of = (name) => rows.map((i) => s[name][i]);
  const at = of("at"), step = of("step_max");
  const times = of("step_s_median").filter((v) => v !== null).sort((a, b) => a - b);
  return {
    key: `${job} ${Math.floor(at[0])}`, name: `${job}, ${clock(at[0])}, steps ${count(Math.min(...step))} to ${count(Math.max(...step))}`,
    job, from: at[0], to: at.at(-1), at, step, time: of("step_s_median"), slowest: of("self_max"), usual: times[Math.floor(times.length / 2)] ?? null,
  };
}

/** A loss of two runs, by step: its name, and of each run [step, value]. Only of this job are saves known; its runs lie apart in time. */
export function losses(runs, saves, job) {
  const rising = saves.slice().sort((a, b) => a.begun_at - b.begun_at);
  const of = (run) => (run.job === job ? rising.filter((s) => s.begun_at >= run.from && s.begun_at <= run.to) : []);
  const names = (some) => new Set(some.flatMap((s) => Object.keys(s.numbers ?? {})));
  const [one, other] = runs.map(of), both = names(other);
  const key = [...names(one)].find((k) => LOSS.test(k) && both.has(k));
  return key ? [key, ...[one, other].map((some) => some.filter((s) => key in s.numbers).map((s) => [s.step, s.numbers[key]]))] : null;
}

export function compare(root) {
  const facts = h("div", {});
  const steps = (v) => `step ${count(v)}`;
  const plots = [
    new Plot("Step time by step", { words: seconds, height: 210, xwords: steps, least: 0 }),
    new Plot("Slowest rank's own time by step", { words: seconds, xwords: steps }),
    new Plot("Steps since the run began", { words: count, xwords: seconds, height: 180 }),
    new Plot("Loss by step, from the metadata of saves", { words: (v) => String(Number(v.toPrecision(4))), xwords: steps }),
  ];
  root.append(h("section", { class: "panel", "aria-label": "Two runs" }, facts), ...plots.map((p) => p.element));

  /** One chart of both: `pick(run)` gives [x, y] pairs whose x rises. */
  function both(plot, one, other, pick) {
    const all = [one, other].map((run) => {
      const pairs = pick(run).filter(([, y]) => y !== null), seen = new Map();
      for (const [x, y] of pairs) seen.set(x, y); // what was made again counts as it was last
      const sorted = [...seen].sort((a, b) => a[0] - b[0]);
      return [sorted.map((p) => p[0]), sorted.map((p) => p[1])];
    });
    const [x, ...values] = uPlot.join(all, [[0, 2], [0, 2]]);
    const filled = values.map((column) => column.map((v) => v ?? null));
    const names = one.job === other.job ? [one, other].map((r) => clock(r.from)) : [one.job, other.job];
    plot.set({ x, series: filled.map((v, i) => ({ name: names[i], values: bridged(v), colour: i, dash: i === 1 })) });
  }

  return {
    draw(one, other, saves) {
      refill(facts, one.key + other.key + one.to, () => table(["Run", "Began", ">Lasted", ">Steps", ">Usual step"], [one, other].map((r) => [
        h("b", {}, r.job), clock(r.from), seconds(r.to - r.from), `${count(Math.min(...r.step))} to ${count(Math.max(...r.step))}`, seconds(r.usual)]), "Two runs"));
      both(plots[0], one, other, (r) => r.step.map((s, i) => [s, r.time[i]]));
      both(plots[1], one, other, (r) => r.step.map((s, i) => [s, r.slowest[i]]));
      both(plots[2], one, other, (r) => r.at.map((t, i) => [t - r.from, r.step[i]]));
      const found = losses([one, other], saves, store.job?.job);
      plots[3].element.hidden = !found;
      if (found) both(plots[3], one, other, (r) => found[r === one ? 1 : 2]);
    },
    end: () => plots.forEach((p) => p.end()),
  };
}

/** Points of the other run lie between: a line goes on over them, up to its last point. */
function bridged(values) {
  const [x, [column]] = known(values.map((_, i) => i), [values], Infinity);
  const out = values.map(() => null);
  x.forEach((at, i) => {
    out[at] = column[i];
    const next = x[i + 1];
    for (let k = at + 1; next !== undefined && k < next; k += 1) out[k] = column[i] + ((column[i + 1] - column[i]) * (k - at)) / (next - at);
  });
  return out;
}
