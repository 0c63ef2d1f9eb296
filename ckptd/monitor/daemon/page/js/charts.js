// Bars of parts in SVG, and what their colours mean; lines over time are in plot.js.

import { h, svg } from "./dom.js";
import { hideTip, showTip } from "./tip.js";

/** Parts beside each other on one bar. `parts` are [key, value, series]; `most` is the value of the full width. */
export function partsBar(parts, { most, label, words, width = 240 }) {
  if (!parts.some(([, v]) => v > 0)) return h("span", { class: "quietly" }, "–");
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
