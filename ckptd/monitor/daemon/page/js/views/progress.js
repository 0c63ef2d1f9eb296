// The job over time: what a step takes, what happened meanwhile, and another run beside it.

import { get } from "../api.js";
import { choice, h, refill, setText, table } from "../dom.js";
import { clock, count, plural, seconds, sentence } from "../format.js";
import { Plot, known } from "../plot.js";
import { listen, store } from "../store.js";
import { LOSS, compare, runsOf } from "./runs.js";

const AGAIN_MS = 5000;
const POINTS = 600;
const RANGES = [["900", "15 min"], ["3600", "1 h"], ["21600", "6 h"], ["86400", "24 h"], ["604800", "7 d"], ["34560000", "All"]];
const LEAST_S = 4;

/**
 * The points without those of ranks that have begun again and not loaded yet: a step far below the one before
 * and the one to which the job is back a moment later. Where it does begin again, the line falls.
 */
export function rising(points) {
  const some = points.filter(([, v]) => v !== null && v !== undefined && Number.isFinite(v));
  let before = -Infinity;
  return some.filter(([x, v], i) => {
    const back = v < before / 2 && some.slice(i + 1).some(([at, later]) => at - x < 60 && later >= before / 2);
    if (!back) before = v;
    return !back;
  });
}

/** What happened, as marks of a chart and as lines of a list, the oldest first. */
export function happened(incidents, generations, saves) {
  const slow = (i) => i.verdict.kind.startsWith("slow");
  return [
    ...incidents.map((i) => ({ at: i.opened_at - (i.latency_s ?? 0), until: i.state === "open" ? store.now : i.updated_at, colour: slow(i) ? "i-slow" : "i-suspect", shape: "incident",
      word: sentence(i.verdict.kind), text: i.headline, href: `#/incidents/${encodeURIComponent(i.id)}` })),
    ...generations.slice(1).map((g) => ({ at: g.started, colour: "text", shape: "restart", word: "Restart", text: `Restart: generation ${g.generation} with ${plural(g.world, "rank")}`, href: "#/elastic" })),
    ...saves.map((s) => ({ at: s.begun_at, colour: s.outcome === "failed" ? "bad" : "i-ok", shape: s.outcome === "failed" ? "incident" : "save",
      word: "Save", text: `Save of step ${count(s.step)}: ${s.outcome}, stall ${seconds(stallOf(s))}`, href: "#/checkpoints" })),
  ].sort((a, b) => a.at - b.at);
}

const stallOf = (s) => Object.values(s.stalls_s).reduce((a, b) => a + b, 0);

/** Numbers of saves as lines: a loss as it is, what is counted on (tokens, samples) as so much a second. */
export function numbersOf(saves) {
  const out = { loss: [], rate: [] };
  const some = saves.filter((s) => s.outcome !== "skipped").sort((a, b) => a.begun_at - b.begun_at);
  for (const key of new Set(some.flatMap((s) => Object.keys(s.numbers ?? {})))) {
    const points = some.filter((s) => key in s.numbers).map((s) => [s.begun_at, s.numbers[key], s.generation]);
    if (LOSS.test(key)) out.loss.push([key, points.map(([at, v]) => [at, v])]);
    else if (/(tokens|samples|sequences|examples|images)(_seen|_total)?$/i.test(key)) {
      const pairs = points.slice(1).map(([at, v, g], i) => [at, v - points[i][1], at - points[i][0], g === points[i][2]]);
      out.rate.push([`${key} a second`, pairs.filter(([, more, s, same]) => more > 0 && s > 0 && same).map(([at, more, s]) => [at, more / s])]);
    }
  }
  return out;
}

export function progress(root) {
  let preset = 3600, range = { seconds: preset, until: null }, beside = null, runs = [], asked = 0, generations = [], saves = [];
  const summary = h("p", { class: "summary", role: "status" });
  const key = (name) => ({ left: () => move(-0.25), right: () => move(0.25), in: () => scale(0.5), out: () => scale(2), reset: () => set({ seconds: preset, until: null }) })[name]();
  const zoom = (from, to) => set({ seconds: Math.max(LEAST_S, to - from), until: to });
  const plots = {
    time: new Plot("Step time", { words: seconds, height: 210, onzoom: zoom, onkey: key, least: 0 }),
    own: new Plot("Own time of a step, outside collectives", { words: seconds, onzoom: zoom, onkey: key }),
    step: new Plot("Step", { words: count, onzoom: zoom, onkey: key }),
    rate: new Plot("Throughput, from the metadata of saves", { words: count, onzoom: zoom, onkey: key, least: 0 }),
    loss: new Plot("Loss, from the metadata of saves", { words: (v) => String(Number(v.toPrecision(4))), onzoom: zoom, onkey: key }),
    stall: new Plot("Stall of saves: what the loop waited for", { words: seconds, height: 120, onzoom: zoom, onkey: key, least: 0 }),
    ranks: new Plot("Ranks that report", { words: count, height: 120, onzoom: zoom, onkey: key, least: 0 }),
  };
  const list = h("div", {});
  const other = h("select", { id: "beside", onchange: () => { beside = runs.find((r) => r.key === other.value) ?? null; load(); } });
  const ranges = h("div", {});
  const steps = [["left", "←", "Earlier"], ["right", "→", "Later"], ["in", "+", "Zoom in"], ["out", "−", "Zoom out"], ["reset", "Now", "Follow the newest"]]
    .map(([name, text, label]) => h("button", { type: "button", class: "small", "aria-label": label, title: label, onclick: () => key(name) }, text));
  const inTime = h("div", { class: "button-row", role: "group", "aria-label": "Time shown" }, ranges, steps);
  const over = h("div", { class: "plots" }, Object.values(plots).map((p) => p.element),
    h("section", { class: "panel", "aria-label": "What happened" }, h("div", { class: "panel-head" }, h("h2", {}, "What happened in this time")), list));
  const both = h("div", { class: "plots", hidden: true });
  const comparing = compare(both);
  root.append(h("div", { class: "view-head" }, h("h1", {}, "Progress"), summary,
    h("div", { class: "controls" }, h("label", { for: "beside" }, "Beside"), other, inTime)), over, both);
  const off = listen(["incidents"], draw);
  const timer = setInterval(() => { if (!document.hidden && store.connection.state === "live") load(range.until === null); }, AGAIN_MS);
  let series = null;

  function set(next) {
    const until = next.until !== null && next.until < (store.now || Date.now() / 1000) - 1 ? next.until : null;
    range = { seconds: Math.min(Math.max(next.seconds, LEAST_S), 4e8), until };
    history.replaceState(null, "", until === null ? "#/progress" : `#/progress/${Math.floor(until - range.seconds)}-${Math.ceil(until)}`);
    if (series && until !== null) {
      series = { ...series, from: until - range.seconds, to: until };
      draw();
    }
    load();
  }
  const shownEnds = () => (range.until === null ? [series?.from ?? store.now - range.seconds, series?.to ?? store.now] : [range.until - range.seconds, range.until]);
  function move(share) {
    const [from, to] = shownEnds();
    set({ seconds: to - from, until: to + share * (to - from) });
  }
  function scale(times) {
    const [from, to] = shownEnds(), middle = (from + to) / 2, half = ((to - from) / 2) * times;
    set(range.until === null ? { seconds: 2 * half, until: null } : { seconds: 2 * half, until: middle + half });
  }

  async function load(fetched = true) {
    const mine = ++asked;
    refill(ranges, String(range.until === null ? range.seconds : "zoomed"), () => choice("Time shown", RANGES, String(range.until === null ? range.seconds : ""), (s) => { preset = Number(s); key("reset"); }));
    try {
      if (fetched || !series) {
        const until = range.until === null ? "" : `&until=${range.until}`;
        const found = await get(`history?what=step,time,self,world&seconds=${range.seconds}&points=${POINTS}${until}`);
        if (mine !== asked) return;
        const to = range.until ?? found.now, from = to - range.seconds;
        series = { ...found, to, from: range.until === null ? Math.max(from, found.at[0] ?? from) : from };
      }
      [generations, saves] = await Promise.all([get("elastic").then((e) => e.generations ?? [], () => []), get("checkpoints").then((c) => c.saves ?? [], () => [])]);
      await listRuns();
    } catch {
      return; // the connection's state says it already
    }
    if (mine === asked) draw();
  }

  async function listRuns() {
    const found = await runsOf();
    runs = found;
    refill(other, runs.map((r) => r.key + r.name).join(), () => [h("option", { value: "" }, runs.length > 1 ? "no other run" : "no other run is known"),
      ...runs.slice(1).map((r) => h("option", { value: r.key }, r.name))]);
    other.disabled = runs.length < 2;
    other.value = beside?.key ?? "";
    beside = runs.find((r) => r.key === beside?.key) ?? null;
  }

  function draw() {
    both.hidden = !beside;
    inTime.hidden = Boolean(beside);
    over.hidden = Boolean(beside);
    if (beside) {
      setText(summary, "two runs by their steps");
      comparing.draw(runs[0], beside, saves);
      return;
    }
    if (!series) return;
    const { at, from, to } = series;
    const inside = (m) => (m.until ?? m.at) >= from && m.at <= to;
    const marks = happened([...store.incidents.values()], generations, saves).filter(inside);
    setText(summary, at.length ? `${clock(from)} to ${range.until === null ? "now" : clock(to)}, ${seconds(to - from)}` : "nothing recorded in this time");
    const line = (plot, names, columns, gap = 0, more = {}) => {
      const [x, values] = known(at, columns, gap);
      plot.set({ x, series: names.map((name, i) => ({ name, values: values[i], colour: [0, 1, 2][i], ...more })), marks, from, to });
    };
    const slowest = Math.max(0, ...series.step_s_p90.filter((v) => v !== null));
    line(plots.time, ["median of ranks", "90 % of ranks"], [series.step_s_median, series.step_s_p90], 3 * slowest);
    line(plots.own, ["median of ranks", "slowest rank"], [series.self_median, series.self_max]);
    const up = rising(at.map((t, i) => [t, series.step_max[i]]));
    const [sx, [sv]] = known(up.map((p) => p[0]), [up.map((p) => p[1])]);
    plots.step.set({ x: sx, series: [{ name: "step", values: sv, colour: 0 }], marks, from, to });
    line(plots.ranks, ["reporting", "of the job"], [series.reporting, series.world]);
    const some = saves.filter((s) => s.begun_at >= from && s.begun_at <= to).sort((a, b) => a.begun_at - b.begun_at);
    plots.stall.set({ x: some.map((s) => s.begun_at), series: [{ name: "slowest rank's stall", values: some.map(stallOf), colour: 2, dots: true }], marks, from, to });
    plots.stall.element.hidden = !saves.length;
    const numbers = numbersOf(saves);
    for (const [name, lines] of Object.entries(numbers)) {
      const xs = [...new Set(lines.flatMap(([, points]) => points.map(([t]) => t)))].sort((a, b) => a - b);
      const of = (points) => { const all = new Map(points); return xs.map((x) => all.get(x) ?? null); };
      plots[name].set({ x: xs, series: lines.map(([label, points], i) => ({ name: label, values: of(points), colour: i })), marks, from, to });
      plots[name].element.hidden = !lines.length;
    }
    drawList(marks);
  }

  function drawList(marks) {
    const some = marks.slice().reverse().slice(0, 100);
    refill(list, JSON.stringify(some.map((m) => [m.at, m.text])), () => some.length
      ? table(["When", "What", "In words"], some.map((m) => [clock(m.at), h("a", { href: m.href }, m.word), h("span", { class: "said" }, m.text)]), "What happened, the newest first")
      : h("p", { class: "quietly" }, "No incident, restart or save."));
  }

  return {
    show: (argument) => {
      const found = /^(\d+)-(\d+)$/.exec(argument ?? "");
      if (found) range = { seconds: Math.max(LEAST_S, Number(found[2]) - Number(found[1])), until: Number(found[2]) };
      load();
    },
    end: () => { off(); clearInterval(timer); Object.values(plots).forEach((p) => p.end()); comparing.end(); },
  };
}

