// The job on one screen: does it run, how far is it, who is not well, what happened last.

import { get } from "../api.js";
import { lineChart } from "../charts.js";
import { h, panel, refill, setText } from "../dom.js";
import { clock, count, percent, plural, seconds } from "../format.js";
import { HeatMap } from "../heatmap.js";
import { listen, store } from "../store.js";
import { BY_WEIGHT, JOB_STATES, STATUSES, shape } from "../words.js";
import { incidentRow } from "./incidents.js";

const HISTORY_S = 3600;
const AGAIN_MS = 10000;

export function overview(root) {
  const tile = (name) => {
    const value = h("p", { class: "tile-value" }), under = h("p", { class: "tile-under" });
    return { value, under, element: h("div", { class: "tile" }, h("h2", {}, name), value, under) };
  };
  const tiles = { state: tile("State"), step: tile("Step"), ranks: tile("Ranks"), agents: tile("Agents"), round: tile("Diagnosis"), goodput: tile("Goodput") };
  const map = new HeatMap(store.ranks, { onselect: (rank) => { if (rank !== null) location.hash = `#/ranks/${rank}`; }, compact: true });
  const statuses = h("ul", { class: "statuses" });
  const frame = h("div", { class: "map-frame small" }, map.element);
  const phases = h("ul", { class: "phases" });
  const latest = h("div", { class: "incident-list" });
  const chart = h("div", { class: "chart-box" });
  root.append(h("h1", { class: "hidden" }, "Overview"),
    h("div", { class: "tiles" }, Object.values(tiles).map((t) => t.element)),
    h("div", { class: "overview-grid" },
      panel("Ranks", { class: "o-ranks", aside: h("a", { href: "#/ranks" }, "All of it") }, statuses, frame, phases),
      panel("Incidents", { class: "o-incidents", aside: h("a", { href: "#/incidents" }, "All incidents") }, latest),
      panel("Steps in the last hour", { class: "o-steps" }, chart)));
  const offs = [listen(["job", "incidents"], drawTiles), listen(["ranks"], drawRanks), listen(["incidents"], drawIncidents)];
  const timer = setInterval(loadHistory, AGAIN_MS);
  let points = [], width = 0;
  const resized = new ResizeObserver(() => { if (chart.clientWidth !== width) drawChart(); });
  resized.observe(chart);

  function set(t, value, under) { setText(t.value, value); setText(t.under, under); }

  function drawTiles() {
    const job = store.job;
    if (!job) return;
    const state = JOB_STATES[job.state] ?? JOB_STATES.waiting;
    const open = store.open;
    refill(tiles.state.value, job.state, () => [shape(state.status), { ok: "Healthy", incident: "Incident", waiting: "Waiting" }[job.state] ?? job.state]);
    setText(tiles.state.under, open.length ? `${plural(open.length, "incident")} open` : lastText());
    const step = job.step ?? {};
    const marked = step.max !== null && step.max !== undefined && step.max >= 0;
    set(tiles.step, marked ? count(step.max) : "–", !marked ? "steps are not marked" : step.min === step.max ? "all ranks" : `the last rank at ${count(step.min)}`);
    set(tiles.ranks, count(job.ranks_reporting), `of ${count(job.world)} report, on ${plural(job.nodes, "node")}`);
    const { up = 0, silent = 0 } = job.agents ?? {};
    set(tiles.agents, count(up), silent ? `${count(silent)} silent` : "none is silent");
    set(tiles.round, seconds((job.round?.cpu_ms ?? NaN) / 1000), `CPU a round, every ${seconds(job.round?.period_s)}`);
    const goodput = job.goodput?.share ?? null;
    set(tiles.goodput, percent(goodput, 1), goodput === null ? "not known yet" : `of ${seconds(job.now - job.up_since)} in training`);
    refill(phases, JSON.stringify(job.phases), () => Object.entries(job.phases ?? {}).filter(([, n]) => n).map(([phase, n]) => h("li", {}, phase.toLowerCase(), h("b", {}, count(n)))));
  }

  function lastText() {
    const last = store.listed()[0];
    return last ? `last incident ${clock(last.opened_at)}` : "no incident so far";
  }

  function drawRanks() {
    const counts = store.ranks.counts();
    refill(statuses, counts.join(), () => !store.ranks.length ? h("li", {}, "No rank reports yet. Agents find the daemon of their job by themselves: ", h("code", {}, "ckptd watch -- COMMAND"), ".") : BY_WEIGHT.slice().reverse().filter((s) => counts[s] || s === 0).map((s) => h("li", { title: STATUSES[s].says }, shape(s), STATUSES[s].word, h("b", {}, count(counts[s])))));
    map.arrangement = store.ranks.mesh ? "mesh" : "node";
    frame.hidden = !store.ranks.length;
    map.draw();
  }

  function drawIncidents() {
    const some = store.listed().slice(0, 6);
    refill(latest, JSON.stringify(some.map((i) => [i.id, i.state, i.updated_at, i.acknowledged_at])), () => some.length
      ? h("ul", {}, some.map((i) => incidentRow(i, false)))
      : h("p", { class: "quietly" }, "None so far. An incident says who or what is suspected, with the evidence and what would refute it."));
  }

  async function loadHistory() {
    if (document.hidden) return;
    try {
      const series = await get(`history?what=step&seconds=${HISTORY_S}&points=400`);
      points = series.at.map((at, i) => [at, series.step_max[i]]);
    } catch {
      points = []; // the connection's state says it already
    }
    drawChart();
  }

  function drawChart() {
    width = chart.clientWidth;
    if (!width) return;
    chart.replaceChildren(lineChart(points, { label: "Step over time", width, height: 150, words: ([x, v]) => [`step ${count(v)}`, clock(x)] }));
  }

  drawTiles(); drawRanks(); drawIncidents(); loadHistory();
  return { end: () => { offs.forEach((off) => off()); clearInterval(timer); resized.disconnect(); map.end(); } };
}
