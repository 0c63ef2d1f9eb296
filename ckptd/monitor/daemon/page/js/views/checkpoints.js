// What each tier holds, and what saves cost the training loop.

import { get } from "../api.js";
import { legend, partsBar } from "../charts.js";
import { h, nothing, panel, refill, setText, table } from "../dom.js";
import { bytes, clock, count, plural, seconds } from "../format.js";
import { store } from "../store.js";

const AGAIN_MS = 10000;
const MOST_SHOWN = 30;

export function checkpoints(root) {
  const summary = h("p", { class: "summary" });
  const tiers = h("div", {}), saves = h("div", {}), problems = h("div", {});
  const tiersPanel = panel("Newest checkpoint by tier", {}, tiers);
  const savesPanel = panel("Saves", {}, saves);
  const empty = nothing("No save was recorded", "");
  empty.lastChild.replaceChildren("Give the daemon the folders that the trainers record to: ", h("code", {}, "Checkpointer(events=FOLDER)"), " and ", h("code", {}, "ckptd serve --events FOLDER"), ".");
  root.append(h("div", { class: "view-head" }, h("h1", {}, "Saves"), summary), problems, h("div", { class: "panel", hidden: true }, empty), tiersPanel, savesPanel);
  const timer = setInterval(load, AGAIN_MS);

  async function load() {
    if (document.hidden) return;
    try {
      draw(await get("checkpoints"));
    } catch (error) {
      refill(problems, error.message, () => h("p", { class: "note", role: "alert" }, `Saves cannot be shown: ${error.message}.`));
    }
  }

  function draw(answer) {
    const some = answer.saves.slice(-MOST_SHOWN).reverse();
    empty.parentElement.hidden = some.length > 0;
    tiersPanel.hidden = savesPanel.hidden = some.length === 0;
    refill(problems, JSON.stringify(answer.problems ?? []), () => (answer.problems ?? []).map((p) => h("p", { class: "note", role: "alert" }, `${p.where ?? ""} ${p.message ?? ""}`)));
    if (!some.length) { setText(summary, ""); return; }
    setText(summary, `${plural(answer.saves.length, "save")}, the newest of step ${count(some[0].step)}`);
    refill(tiers, JSON.stringify([answer.tiers, Math.floor(store.now / 10)]), () => table(["Tier", ">Step", "Durable at", ">Ago", ">Size"],
      answer.tiers.map((t) => [h("b", {}, t.tier), count(t.last_step), clock(t.durable_at), store.now ? seconds(store.now - t.durable_at) : "–", bytes(t.bytes)]), "Newest checkpoint of each tier"));
    refill(saves, JSON.stringify(some), () => profile(some));
  }

  load();
  return { end: () => clearInterval(timer) };
}

function profile(saves) {
  const phases = [...new Set(saves.flatMap((s) => Object.keys(s.stalls_s)))];
  const total = (s) => Object.values(s.stalls_s).reduce((a, b) => a + b, 0);
  const most = Math.max(1e-9, ...saves.map(total));
  const bar = (s) => partsBar(phases.map((p, i) => [p, s.stalls_s[p] ?? 0, i]), {
    most, label: `stall of step ${s.step}: ${phases.filter((p) => s.stalls_s[p]).map((p) => `${p} ${seconds(s.stalls_s[p])}`).join(", ") || "none"}`,
    words: (phase, value) => [`step ${s.step}`, `${phase}: ${seconds(value)}`],
  });
  return [legend(phases), table([">Step", "Begun", "Outcome", ">Size", ">Took", ">Slowest rank", "Slowest", ">Stall", "Stall by phase"], saves.map((s) => [
    count(s.step), clock(s.begun_at), h("span", { class: s.outcome === "failed" ? "bad" : "", title: s.reason ?? "" }, s.outcome + (s.reason ? ": " : ""), s.reason ? h("span", { class: "clip" }, s.reason) : null),
    bytes(s.bytes), seconds(s.durations_s?.all), s.slowest_rank === null ? "–" : h("a", { href: `#/ranks/${s.slowest_rank}` }, String(s.slowest_rank)), s.slowest || "–", seconds(total(s)), bar(s),
  ]), "Saves, the newest first")];
}
