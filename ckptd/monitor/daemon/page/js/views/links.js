// Delays between nodes, as a matrix of senders and receivers.

import { get } from "../api.js";
import { h, nothing, panel, refill, setText, table } from "../dom.js";
import { clock, plural, ratio, seconds } from "../format.js";
import { palette, ramped } from "../scale.js";
import { listen, store } from "../store.js";
import { hideTip, showTip } from "../tip.js";

const LABEL = 74;
const MOST_LISTED = 24;
const SUSPECT_RATIO = 1.5;
/** Ratios from 1 to 8 fill the ramp, in equal steps of the logarithm. */
const place = (r) => Math.log2(Math.max(1, r ?? 8)) / 3;

export function links(root) {
  const canvas = h("canvas", { class: "matrix", tabindex: "0", role: "application", "aria-roledescription": "matrix of delays", "aria-label": "Delays from node to node. Arrow keys move." });
  const said = h("p", { class: "hidden", role: "status", "aria-live": "polite" });
  const box = h("div", { class: "matrix-box" }, canvas, said);
  const empty = nothing("No link was probed yet", "Probes are sent when a communication hang or a slow step without a slow rank is suspected, never in a healthy job.");
  const summary = h("p", { class: "summary" });
  const effects = h("div", {}), slowest = h("div", {});
  root.append(h("div", { class: "view-head" }, h("h1", {}, "Links"), summary),
    h("div", { class: "split" },
      h("div", { class: "panel matrix-panel" }, empty, box, h("p", { class: "quietly", id: "matrix-says" }, "Rows send, columns receive. The further from the background, the slower against what is usual of the row and the column; a ringed cell is at least ×1.5.")),
      h("div", { class: "side-column" }, panel("What stands out", {}, effects), panel("Slowest links", {}, slowest))));
  let at = null, geometry = null, edges = new Map();
  const resized = new ResizeObserver(drawMatrix);
  resized.observe(box);
  const themed = () => drawMatrix();
  addEventListener("themechange", themed);
  const off = listen(["links"], draw);

  function draw() {
    const answer = store.links;
    const some = Boolean(answer?.edges?.length);
    empty.hidden = some;
    box.hidden = document.getElementById("matrix-says").hidden = !some;
    setText(summary, some ? `${plural(answer.edges.length, "link")} between ${plural(answer.nodes.length, "node")}, probed at ${clock(answer.at)}` : "");
    const found = answer?.effects ?? [];
    refill(effects, JSON.stringify(found), () => found.length
      ? table(["What", "Name", ">Delay"], found.map((e) => [e.target, h("b", {}, String(e.name).replace(">", " → ")), ratio(e.ratio)]), "Nodes and links that are slower than the rest")
      : h("p", { class: "quietly" }, some ? "Nothing: all delays are as usual." : "Nothing is known."));
    if (!some) { refill(slowest, "none", () => h("p", { class: "quietly" }, "Nothing is known.")); return; }
    edges = new Map(answer.edges.map((e) => [`${e[0]},${e[1]}`, e]));
    const worst = answer.edges.slice().sort((a, b) => (b[3] ?? Infinity) - (a[3] ?? Infinity)).slice(0, MOST_LISTED);
    refill(slowest, JSON.stringify(worst), () => table(["From", "To", ">Took", ">Delay"], worst.map((e) => [answer.nodes[e[0]], answer.nodes[e[1]], e[2] === null ? "no answer" : seconds(e[2]), ratio(e[3])]), "Slowest links"));
    drawMatrix();
  }

  function drawMatrix() {
    const answer = store.links;
    const width = box.clientWidth;
    if (!answer?.edges?.length || !width) return;
    const n = answer.nodes.length;
    const named = (Math.min(width, 760) - LABEL) / n >= 11;
    const left = named ? LABEL : 28;
    const size = Math.max(1 / (devicePixelRatio || 1), Math.min(30, (Math.min(width, 760) - left) / n));
    geometry = { left, size, n };
    const side = left + n * size + 2;
    const dense = devicePixelRatio || 1;
    canvas.width = canvas.height = Math.ceil(side * dense);
    canvas.style.width = canvas.style.height = `${side}px`;
    const c = canvas.getContext("2d");
    c.setTransform(dense, 0, 0, dense, 0, 0);
    const colours = palette();
    c.fillStyle = colours.none;
    c.fillRect(left, left, n * size, n * size);
    // The slowest are drawn last, so that they stay visible where cells are smaller than a point.
    for (const [from, to, , r] of answer.edges.slice().sort((a, b) => (a[3] ?? 99) - (b[3] ?? 99))) {
      const least = (r ?? 99) >= SUSPECT_RATIO ? 3 : 1;
      const wide = Math.max(least, size - (size > 5 ? 1 : 0));
      c.fillStyle = ramped(colours, place(r));
      c.fillRect(left + to * size, left + from * size, wide, wide);
      if ((r ?? 99) >= SUSPECT_RATIO && size > 4) {
        c.strokeStyle = colours.mark[0];
        c.lineWidth = 1.5;
        c.strokeRect(left + to * size - 0.5, left + from * size - 0.5, wide + 1, wide + 1);
      }
    }
    labels(c, colours, answer.nodes, named);
    if (at && document.activeElement === canvas) {
      c.strokeStyle = colours.focus;
      c.lineWidth = 2;
      c.strokeRect(left + at[1] * size - 1, left + at[0] * size - 1, Math.max(6, size + 1), Math.max(6, size + 1));
    }
  }

  function labels(c, colours, nodes, named) {
    const { left, size, n } = geometry;
    c.fillStyle = colours.muted;
    c.font = `11px ${colours.font}`;
    if (!named) {
      c.fillText("to →", left, left - 8);
      c.save(); c.translate(left - 10, left + 34); c.rotate(-Math.PI / 2); c.fillText("← from", 0, 0); c.restore();
      return;
    }
    c.textBaseline = "middle";
    for (let i = 0; i < n; i += 1) {
      c.textAlign = "right";
      c.fillText(short(nodes[i]), left - 6, left + (i + 0.5) * size);
      c.save(); c.translate(left + (i + 0.5) * size, left - 6); c.rotate(-Math.PI / 2); c.textAlign = "left"; c.fillText(short(nodes[i]), 0, 0); c.restore();
    }
    c.textAlign = "left";
  }

  function words(from, to) {
    const edge = edges.get(`${from},${to}`);
    const names = store.links.nodes;
    const head = `${names[from]} → ${names[to]}`;
    return edge ? [head, edge[2] === null ? "no answer" : seconds(edge[2]), `${ratio(edge[3])} of what is usual`] : [head, from === to ? "itself" : "not probed"];
  }

  canvas.addEventListener("pointermove", (event) => {
    if (!geometry) return;
    const bounds = canvas.getBoundingClientRect();
    const to = Math.floor((event.clientX - bounds.left - geometry.left) / geometry.size);
    const from = Math.floor((event.clientY - bounds.top - geometry.left) / geometry.size);
    if (from < 0 || to < 0 || from >= geometry.n || to >= geometry.n) hideTip();
    else showTip(event.clientX, event.clientY, words(from, to));
  });
  canvas.addEventListener("pointerleave", hideTip);
  canvas.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (!step || !geometry) return;
    event.preventDefault();
    const inside = (v) => Math.min(geometry.n - 1, Math.max(0, v));
    at = at ? [inside(at[0] + step[0]), inside(at[1] + step[1])] : [0, 0];
    setText(said, words(...at).join(", "));
    drawMatrix();
  });
  for (const name of ["focus", "blur"]) canvas.addEventListener(name, drawMatrix);

  draw();
  get("links").then((answer) => store.setLinks(answer)).catch(() => {}); // the connection's state says it
  return { end: () => { off(); resized.disconnect(); removeEventListener("themechange", themed); hideTip(); } };
}

const short = (name) => (name.length > 11 ? `…${name.slice(-10)}` : name);
