// The heat map of all ranks, what its colours mean, the ranks that are not ok, and the one chosen.

import { choice, h, nothing, refill, setText } from "../dom.js";
import { count, plural, seconds } from "../format.js";
import { HeatMap } from "../heatmap.js";
import { RankPanel } from "../rankpanel.js";
import { MEASURES, palette, ramped, scaleOf } from "../scale.js";
import { listen, store } from "../store.js";
import { BY_WEIGHT, STATUSES, shape, statusOf } from "../words.js";

const MOST_LISTED = 100;

export function ranks(root) {
  const go = (rank) => { history.replaceState(null, "", rank === null ? "#/ranks" : `#/ranks/${rank}`); choose(rank); };
  const map = new HeatMap(store.ranks, { onselect: go });
  const details = new RankPanel(() => { go(null); map.element.focus({ preventScroll: true }); });
  const legend = h("div", { class: "map-legend" });
  const odd = h("ul", { class: "odd-list" });
  const oddTitle = h("h2", {});
  const where = h("div", {});
  const summary = h("p", { class: "summary" });
  const frame = h("div", { class: "map-frame" }, map.element);
  const empty = nothing("No rank reports yet", "Ranks appear here as soon as their node's agent sends its first report.");
  root.append(
    h("div", { class: "view-head" }, h("h1", {}, "Ranks"), summary,
      h("div", { class: "controls" }, where,
        choice("Colour by", Object.entries(MEASURES).map(([k, m]) => [k, m.title]), "status", (measure) => { map.set({ measure }); drawLegend(); }))),
    h("div", { class: "split" },
      h("div", { class: "panel map-panel" }, empty, frame, legend),
      h("div", { class: "side-column" }, details.element, h("section", { class: "panel odd", "aria-labelledby": "odd-title" }, h("div", { class: "panel-head" }, oddTitle), odd))));
  oddTitle.id = "odd-title";
  const offs = [listen(["ranks"], draw)];
  addEventListener("themechange", drawLegend);

  function choose(rank) {
    map.select(rank);
    details.show(rank);
    root.classList.toggle("has-rank", rank !== null);
  }

  function draw() {
    const n = store.ranks.length;
    empty.hidden = n > 0;
    frame.hidden = legend.hidden = n === 0;
    refill(where, String(Boolean(store.ranks.mesh)), () => {
      const mesh = store.ranks.mesh;
      map.arrangement = mesh ? "mesh" : "node";
      const name = mesh ? mesh.axes.join(" × ") : "Mesh";
      return [choice("Arrange by", [["mesh", name, !mesh], ["node", "Nodes"]], map.arrangement, (arrangement) => map.set({ arrangement }))];
    });
    map.draw();
    drawLegend();
    const counts = store.ranks.counts();
    setText(summary, n ? `${plural(n, "rank")} on ${plural(store.ranks.nodes.length, "node")}` : "");
    drawOdd(n - counts[0] - counts[1]);
  }

  function drawLegend() {
    const counts = store.ranks.counts();
    if (map.measure === "status") {
      refill(legend, `s${counts.join()}`, () => h("ul", { class: "statuses" }, BY_WEIGHT.slice().reverse().map((s) =>
        h("li", { class: counts[s] ? "" : "zero", title: STATUSES[s].says }, shape(s), STATUSES[s].word, h("b", {}, count(counts[s]))))));
      return;
    }
    const scale = scaleOf(map.measure, store.ranks);
    const key = `${map.measure}${scale.ticks.map(scale.words).join()}${document.documentElement.dataset.theme}`;
    refill(legend, key, () => ramp(scale));
  }

  function drawOdd(n) {
    const all = store.ranks;
    setText(oddTitle, n ? `${plural(n, "rank")} not ok` : "All ranks are ok");
    const rows = [];
    for (const status of BY_WEIGHT.slice(0, 4)) {
      for (let row = 0; row < all.length && rows.length < MOST_LISTED; row += 1) if (all.status[row] === status) rows.push(row);
    }
    refill(odd, rows.map((r) => `${all.rank[r]}:${all.status[r]}`).join() + n, () => [
      ...rows.map((row) => h("li", {}, h("button", { type: "button", class: "row-button", id: `odd-${all.rank[row]}`, onclick: () => go(all.rank[row]) },
        shape(all.status[row]), h("b", {}, `Rank ${all.rank[row]}`), h("span", {}, statusOf(all.status[row]).word), h("span", { class: "end", "data-row": row })))),
      n > rows.length ? h("li", { class: "quietly" }, `and ${count(n - rows.length)} more`) : null,
    ].filter(Boolean));
    for (const node of odd.querySelectorAll("[data-row]")) {
      const row = Number(node.dataset.row);
      setText(node, all.status[row] === 5 && all.score[row] ? `×${all.score[row].toFixed(2)}` : seconds(all.age("progress_age_s", row)));
    }
  }

  draw();
  return {
    show: (argument) => choose(argument !== null && /^\d+$/.test(argument) ? Number(argument) : null),
    end: () => { offs.forEach((off) => off()); removeEventListener("themechange", drawLegend); map.end(); details.end(); root.classList.remove("has-rank"); },
  };
}

function ramp(scale) {
  const colours = palette();
  const canvas = h("canvas", { width: 220, height: 10, class: "ramp", "aria-hidden": "true" });
  const c = canvas.getContext("2d");
  for (let x = 0; x < 220; x += 1) { c.fillStyle = ramped(colours, x / 219); c.fillRect(x, 0, 1, 10); }
  return h("div", { class: "ramp-box" }, h("span", {}, scale.title), h("div", {}, canvas,
    h("div", { class: "ramp-ticks" }, scale.ticks.map((t) => h("span", {}, scale.words(t))))), h("span", { class: "quietly" }, scale.says));
}
