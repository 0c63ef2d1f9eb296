// The one small box beside the pointer. Decoration: what it says is always reachable otherwise.

import { h } from "./dom.js";

const box = () => document.getElementById("tip");

export function showTip(x, y, lines) {
  const tip = box();
  tip.replaceChildren(...lines.map((line, i) => h("div", { class: i ? "" : "tip-head" }, line)));
  tip.hidden = false;
  const { offsetWidth: w, offsetHeight: t } = tip;
  tip.style.left = `${x + 14 + w > innerWidth ? Math.max(4, x - w - 10) : x + 14}px`;
  tip.style.top = `${y + 16 + t > innerHeight ? Math.max(4, y - t - 10) : y + 16}px`;
}

export function hideTip() {
  box().hidden = true;
}
