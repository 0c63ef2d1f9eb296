// The job on one screen: does it run, how far is it, who is not well, what happened last.

import { get } from "../api.js";
import { h, panel, refill, setText } from "../dom.js";
import { clock, count, percent, plural, seconds, sentence } from "../format.js";
import { HeatMap } from "../heatmap.js";
import { Plot, known } from "../plot.js";
import { listen, store } from "../store.js";
import { total } from "./controller.js";
import { BY_WEIGHT, LOST, STATUSES, shape, stateOf } from "../words.js";
import { incidentRow } from "./incidents.js";
import { happened } from "./progress.js";

const HISTORY_S = 3600;
const AGAIN_MS = 10000;

export function overview(root) {
  const tile = (name) => {
    const value = h("p", { class: "tile-value" }), under = h("p", { class: "tile-under" });
    return { value, under, element: h("div", { class: "tile" }, h("h2", {}, name), value, under) };
  };
  const tiles = { state: tile("State"), step: tile("Step"), ranks: tile("Ranks"), agents: tile("Agents"), saved: tile("Saved"), goodput: tile("Goodput") };
  const map = new HeatMap(store.ranks, { onselect: (rank) => { if (rank !== null) location.hash = `#/ranks/${rank}`; }, compact: true });
  const statuses = h("ul", { class: "statuses" });
  const frame = h("div", { class: "map-frame small" }, map.element);
  const phases = h("ul", { class: "phases" });
  const latest = h("div", { class: "incident-list" });
  const recovered = h("div", { class: "recoveries" });
  const times = new Plot("Step time in the last hour", { words: seconds, height: 170, least: 0, aside: h("a", { href: "#/progress" }, "Over time") });
  times.element.classList.add("o-steps");
  root.append(h("h1", { class: "hidden" }, "Overview"),
    h("div", { class: "tiles" }, Object.values(tiles).map((t) => t.element)),
    h("div", { class: "overview-grid" },
      panel("Ranks", { class: "o-ranks", aside: h("a", { href: "#/ranks" }, "All of it") }, statuses, frame, phases),
      panel("Incidents", { class: "o-incidents", aside: h("a", { href: "#/incidents" }, "All incidents") }, latest),
      panel("Recoveries", { class: "o-recoveries", aside: h("a", { href: "#/elastic" }, "All recoveries") }, recovered),
      times.element));
  const offs = [listen(["job", "incidents", "connection"], drawTiles), listen(["ranks"], drawRanks), listen(["incidents"], drawIncidents), listen(["elastic"], drawRecoveries), listen(["elastic"], drawTiles)];
  const timer = setInterval(loadHistory, AGAIN_MS);
  let series = null, saves = null, all = [];

  function set(t, value, under) { setText(t.value, value); setText(t.under, under); }

  function drawTiles() {
    const job = store.job;
    if (!job) return;
    const state = stateOf(job);
    const open = store.open;
    refill(tiles.state.value, state.title, () => [shape(state.status), state.title]);
    setText(tiles.state.under, state === LOST ? `connection lost since ${clock(store.connection.since / 1000)}` : open.length ? `${plural(open.length, "incident")} open` : lastText());
    const step = job.step ?? {};
    const marked = step.max !== null && step.max !== undefined && step.max >= 0;
    const status = store.elastic?.status;
    set(tiles.step, marked ? count(step.max) : "–", !marked ? "steps are not marked" : step.min === step.max ? "all ranks" : `the last rank at ${count(step.min)}`);
    const durable = saves?.filter((s) => s.last_step !== null) ?? [];
    const newest = durable.length ? Math.max(...durable.map((s) => s.last_step)) : null;
    const committed = status?.step > 0 ? status.step : null;
    set(tiles.saved, newest !== null ? count(newest) : committed !== null ? count(committed) : "–",
      newest !== null ? `newest durable step, in ${durable.map((s) => s.tier).join(", ")}` : committed !== null ? "last committed step" : "no save is known");
    set(tiles.ranks, count(job.ranks_reporting), `of ${count(job.world)} report, on ${plural(job.nodes, "node")}`);
    const { up = 0, silent = 0 } = job.agents ?? {};
    set(tiles.agents, count(up), silent ? `${count(silent)} silent` : "none is silent");
    const goodput = job.goodput?.share ?? null;
    set(tiles.goodput, percent(goodput, 1), goodput === null ? "not known yet" : `of ${seconds(job.now - job.up_since)} in new steps`);
    refill(phases, JSON.stringify(job.phases), () => Object.entries(job.phases ?? {}).filter(([, n]) => n).map(([phase, n]) => h("li", {}, phase.toLowerCase(), h("b", {}, count(n)))));
  }

  /** What happened last: a rank that dies and is replaced at once is no incident, and no quiet life. */
  function lastText() {
    const last = store.listed()[0], back = faults()[0];
    if (back && (!last || back.at > last.opened_at)) return `last recovery ${clock(back.at)}`;
    return last ? `last incident ${clock(last.opened_at)}` : store.elastic?.status ? "no incident or recovery so far" : "no incident so far";
  }

  /** Recoveries that nobody wanted, the newest first. */
  function faults() {
    return (store.elastic?.status?.recoveries ?? []).filter((r) => !r.planned).slice().reverse();
  }

  function drawRecoveries() {
    const link = store.elastic?.controller, all = (store.elastic?.status?.recoveries ?? []).slice().reverse();
    refill(recovered, JSON.stringify([!!link, all.slice(0, 5)]), () => all.length
      ? h("ul", { class: "plain" }, all.slice(0, 5).map((r) => h("li", {}, h("b", {}, clock(r.at)), " ", sentence(r.cause), r.planned ? " (planned)" : "", h("span", { class: "quietly" }, ` ${seconds(total(r))}, ${plural(r.steps_lost, "step")} lost`))))
      : h("p", { class: "quietly" }, link ? "None so far." : "The job has no controller: what restarts it is not seen here."));
  }

  function drawRanks() {
    const counts = store.ranks.counts();
    refill(statuses, counts.join(), () => !store.ranks.length ? h("li", { class: "empty" }, h("p", {}, "No rank reports yet. Agents find the daemon of their job by themselves: ", h("code", {}, "ckptd watch -- COMMAND"), ".")) : BY_WEIGHT.slice().reverse().filter((s) => counts[s] || s === 0).map((s) => h("li", { title: STATUSES[s].says }, shape(s), STATUSES[s].word, h("b", {}, count(counts[s])))));
    map.arrangement = store.ranks.mesh ? "mesh" : "node";
    frame.hidden = !store.ranks.length;
    map.draw();
  }

  function drawIncidents() {
    const some = store.listed().slice(0, 6);
    refill(latest, JSON.stringify(some.map((i) => [i.id, i.state, i.updated_at, i.acknowledged_at])), () => some.length
      ? h("ul", {}, some.map((i) => incidentRow(i, false, i.state === "open")))
      : h("p", { class: "quietly" }, "None so far. An incident says who or what is suspected, with the evidence and what would refute it."));
  }

  async function loadHistory() {
    if (document.hidden) return;
    try {
      series = await get(`history?what=time&seconds=${HISTORY_S}&points=400`);
    } catch {
      // the connection's state says it already; what was known stays
    }
    try {
      const told = await get("checkpoints");
      [saves, all] = [told.tiers ?? [], told.saves ?? []];
    } catch (error) {
      if (error.status) [saves, all] = [null, []]; // the daemon knows of no folder of events
    }
    drawTiles();
    drawChart();
  }

  function drawChart() {
    if (!series) return;
    const [x, [median, most]] = known(series.at, [series.step_s_median, series.step_s_p90], 3 * Math.max(0, ...series.step_s_p90));
    times.set({ x, series: [{ name: "median of ranks", values: median, colour: 0 }, { name: "90 % of ranks", values: most, colour: 1 }],
      marks: happened([...store.incidents.values()], [], all) });
  }

  drawTiles(); drawRanks(); drawIncidents(); drawRecoveries(); loadHistory();
  return { end: () => { offs.forEach((off) => off()); clearInterval(timer); times.end(); map.end(); } };
}
