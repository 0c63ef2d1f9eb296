// Small charts in SVG: a line over time, and bars of parts.

import { h, svg } from "./dom.js";
import { count } from "./format.js";
import { hideTip, showTip } from "./tip.js";

/**
 * A line over time: `points` are [seconds before now (<= 0) or any x, value | null].
 * `words(point)` gives the lines of the tip.
 */
export function lineChart(points, { label, width, height = 120, words, axis = count, from = null }) {
  const known = points.filter(([, v]) => v !== null && v !== undefined && Number.isFinite(v));
  if (known.length < 2) return h("p", { class: "quietly" }, "Nothing recorded yet.");
  const left = 52, bottom = 20, top = 8;
  const xs = known.map((p) => p[0]), vs = known.map((p) => p[1]);
  const [x0, x1] = [from ?? xs[0], xs.at(-1)];
  const [low, high, ticks] = ticksOf(Math.min(...vs), Math.max(...vs));
  const px = (x) => left + ((x - x0) / Math.max(1e-9, x1 - x0)) * (width - left - 8);
  const py = (v) => top + (1 - (v - low) / (high - low)) * (height - top - bottom);
  const line = known.map(([x, v], i) => `${i ? "L" : "M"}${px(x).toFixed(1)} ${py(v).toFixed(1)}`).join("");
  const dot = svg("circle", { r: 3, class: "chart-dot", cx: -9, cy: -9 });
  const node = svg("svg", { class: "chart", width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label },
    ticks.map((t) => [
      svg("line", { class: "grid", x1: left, x2: width - 8, y1: py(t), y2: py(t) }),
      svg("text", { class: "tick", x: left - 8, y: py(t) + 4, "text-anchor": "end" }, axis(t)),
    ]),
    timeTicks(x0, x1, width).map(([x, text]) => svg("text", { class: "tick", x: px(x), y: height - 4, "text-anchor": "middle" }, text)),
    svg("path", { class: "chart-line", d: line }), dot);
  node.addEventListener("pointermove", (event) => {
    const at = x0 + ((event.offsetX - left) / (width - left - 8)) * (x1 - x0);
    const point = known.reduce((a, b) => (Math.abs(b[0] - at) < Math.abs(a[0] - at) ? b : a));
    dot.setAttribute("cx", px(point[0]));
    dot.setAttribute("cy", py(point[1]));
    showTip(event.clientX, event.clientY, words(point));
  });
  node.addEventListener("pointerleave", () => { dot.setAttribute("cx", -9); hideTip(); });
  return node;
}

function ticksOf(least, most) {
  const span = Math.max(most - least, Math.abs(most) * 0.02, 1e-9);
  const raw = span / 3;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw);
  const low = Math.floor(least / step) * step;
  const high = Math.max(low + step, Math.ceil(most / step) * step);
  const ticks = [];
  for (let t = low; t <= high + step / 2; t += step) ticks.push(Number(t.toPrecision(10)));
  return [low, high, ticks];
}

function timeTicks(x0, x1, width) {
  const most = Math.max(2, Math.floor(width / 110));
  const step = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 86400].find((s) => (x1 - x0) / s <= most) ?? 604800;
  const out = [];
  for (let x = Math.ceil(x0 / step) * step; x <= x1; x += step) {
    const at = new Date(x * 1000);
    const two = (n) => String(n).padStart(2, "0");
    out.push([x, step < 60 ? `${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}`
      : step < 86400 ? `${two(at.getHours())}:${two(at.getMinutes())}` : `${at.getMonth() + 1}-${two(at.getDate())}`]);
  }
  return out.filter(([x]) => x > x0 + (x1 - x0) * 0.04 && x < x1 - (x1 - x0) * 0.07);
}

/** Parts beside each other on one bar. `parts` are [key, value, series]; `most` is the value of the full width. */
export function partsBar(parts, { most, label, words, width = 240 }) {
  const height = 14;
  let x = 0;
  const cells = parts.filter(([, v]) => v > 0).map(([key, v, series]) => {
    const wide = Math.max(1.5, (v / most) * width);
    const cell = svg("rect", { x: x.toFixed(1), y: 0, width: Math.max(1, wide - 1).toFixed(1), height, class: `series-${series % 8}` });
    cell.addEventListener("pointermove", (event) => showTip(event.clientX, event.clientY, words(key, v)));
    cell.addEventListener("pointerleave", hideTip);
    x += wide;
    return cell;
  });
  return svg("svg", { class: "parts", viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img", "aria-label": label }, cells);
}

export function legend(names) {
  return h("ul", { class: "legend" }, names.map((name, i) => h("li", {},
    svg("svg", { viewBox: "0 0 10 10", class: "swatch", "aria-hidden": "true" }, svg("rect", { width: 10, height: 10, rx: 2, class: `series-${i % 8}` })), name)));
}
