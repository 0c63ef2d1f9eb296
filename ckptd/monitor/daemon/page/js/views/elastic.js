// Lives of the job, what each restart cost, and what the time went into.

import { get } from "../api.js";
import { legend, partsBar } from "../charts.js";
import { h, nothing, panel, refill, setText, table } from "../dom.js";
import { clock, count, percent, plural, seconds } from "../format.js";
import { listen, store } from "../store.js";
import { controller } from "./controller.js";

const AGAIN_MS = 5000;
/** What goodput counts, in the order of the bar: [word, names in the API]. */
const KINDS = [["training", ["TRAIN"]], ["slow ranks", ["slow"]], ["evaluating", ["EVAL"]], ["made again", ["again"]], ["saving", ["CKPT"]],
  ["stuck", ["stuck"]], ["starting and ending", ["INIT", "COMPILE", "EXIT"]], ["restarting", ["restarting"]]];

export function elastic(root) {
  const summary = h("p", { class: "summary" });
  const share = h("p", { class: "big" }), under = h("p", { class: "tile-under" });
  const split = h("div", {}), lives = h("div", {});
  root.append(h("div", { class: "view-head" }, h("h1", {}, "Elastic and goodput"), summary));
  const controlled = controller(root);
  root.append(panel("Goodput", {}, h("div", { class: "goodput" }, h("div", {}, share, under), split)),
    panel("Generations", {}, lives));
  const off = listen(["job"], drawGoodput);
  const timer = setInterval(load, AGAIN_MS);

  function drawGoodput() {
    const goodput = store.job?.goodput;
    setText(share, goodput ? percent(goodput.share, 1) : "–");
    setText(under, goodput ? `of the time went into new steps, since ${clock(store.job.up_since)}` : "Not known before the first rank reports.");
    const spent = goodput?.seconds ?? {};
    const parts = KINDS.map(([word, names], i) => [word, names.reduce((a, n) => a + (spent[n] ?? 0), 0), i]);
    const total = parts.reduce((a, [, v]) => a + v, 0);
    refill(split, JSON.stringify(spent), () => {
      if (!total) return [];
      return [partsBar(parts, { most: total, width: 900, label: "What the time went into", words: (k, v) => [k, seconds(v), percent(v / total, 1)] }),
        h("ul", { class: "legend" }, parts.filter(([, v]) => v).map(([k, v, i]) => h("li", {}, legend(KINDS.map(([word]) => word)).children[i].firstChild, k, h("b", {}, seconds(v)))))];
    });
  }

  async function load() {
    if (document.hidden) return;
    try {
      drawLives((await get("elastic")).generations ?? []);
    } catch {
      // the connection's state says it already
    }
  }

  function drawLives(all) {
    const restarts = all.filter((g) => g.split && Object.keys(g.split).length);
    const costs = restarts.map((g) => Object.values(g.split).reduce((a, b) => a + b, 0));
    setText(summary, all.length ? `${plural(all.length, "generation")}${costs.length ? `, ${plural(costs.length, "restart")} after an incident, ${seconds(costs.reduce((a, b) => a + b, 0) / costs.length)} to recover on average` : ""}` : "");
    const parts = [...new Set(restarts.flatMap((g) => Object.keys(g.split)))];
    const most = Math.max(1e-9, ...costs);
    const word = (p) => p.replace(/_s$/, "").replaceAll("_", " ");
    refill(lives, JSON.stringify([all, Math.floor(store.now / 5)]), () => all.length ? [parts.length ? legend(parts.map(word)) : null,
      table([">Generation", ">Ranks", "Began", "Ended", ">Lived", "Why", ">Recovery", "Split"], all.slice().reverse().map((g) => [
        count(g.generation), count(g.world), clock(g.started), g.ended ? clock(g.ended) : h("b", {}, "runs"), seconds((g.ended ?? (store.now || Date.now() / 1000)) - g.started),
        g.why ? h("a", { href: `#/incidents/${encodeURIComponent(g.why)}` }, g.why) : "–",
        Object.keys(g.split ?? {}).length ? seconds(Object.values(g.split).reduce((a, b) => a + b, 0)) : "–",
        partsBar(parts.map((p, i) => [word(p), g.split?.[p] ?? 0, i]), { most, label: parts.map((p) => `${word(p)} ${seconds(g.split?.[p])}`).join(", "), words: (p, v) => [`generation ${g.generation}`, `${p}: ${seconds(v)}`] }),
      ]), "Generations of the job, the newest first")].filter(Boolean)
      : nothing("No generation yet", "A generation is one life of the job between restarts."));
  }

  drawGoodput(); load();
  return { end: () => { off(); controlled.end(); clearInterval(timer); } };
}
