// The map of ranks: one cell a rank on a canvas, with pointer and keyboard.

import { h, setText } from "./dom.js";
import { byMesh, byNode, cellAt, towards } from "./layout.js";
import { MEASURES, palette, ramped, scaleOf } from "./scale.js";
import { hideTip, showTip } from "./tip.js";
import { statusOf } from "./words.js";

const KEYS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

export class HeatMap {
  /** `onselect(rank | null)` when a rank is chosen; `oncursor(row)` as the cursor moves. */
  constructor(ranks, { onselect, compact = false }) {
    this.ranks = ranks;
    this.onselect = onselect;
    this.compact = compact;
    this.measure = "status";
    this.arrangement = "node";
    this.selected = null; // a rank
    this.cursor = null; // a rank, by keyboard
    this.canvas = h("canvas", { class: "map-canvas", "aria-hidden": "true" });
    this.said = h("p", { class: "hidden", role: "status", "aria-live": "polite" });
    this.element = h("div", {
      class: "map", tabindex: "0", role: "application", "aria-roledescription": "map of ranks",
      "aria-label": "Ranks. Arrow keys move, Enter shows a rank, N goes to the next that is not ok, Escape leaves it.",
    }, this.canvas, this.said);
    this.listenTo();
    this.colours = null;
    this.shape = -1;
    this.resized = new ResizeObserver(() => { this.shape = -1; this.draw(); });
    this.resized.observe(this.element);
    this.themed = () => { this.colours = null; this.draw(); };
    addEventListener("themechange", this.themed);
  }

  end() {
    this.resized.disconnect();
    removeEventListener("themechange", this.themed);
    hideTip();
  }

  set(options) {
    Object.assign(this, options);
    this.shape = -1;
    this.draw();
  }

  select(rank) {
    this.selected = rank;
    if (rank !== null) this.cursor = rank;
    this.draw();
  }

  // -- drawing --------------------------------------------------------------------------------------

  arrange() {
    const width = this.element.clientWidth;
    const mesh = this.arrangement === "mesh" && this.ranks.mesh;
    this.place = mesh ? byMesh(this.ranks, width) : byNode(this.ranks, width);
    this.shape = this.ranks.shape;
    const dense = devicePixelRatio || 1;
    this.canvas.width = Math.round(this.place.width * dense);
    this.canvas.height = Math.round(this.place.height * dense);
    this.canvas.style.width = `${this.place.width}px`;
    this.canvas.style.height = `${this.place.height}px`;
    this.context = this.canvas.getContext("2d");
    this.context.setTransform(dense, 0, 0, dense, 0, 0);
  }

  draw() {
    const begun = performance.now();
    if (!this.element.clientWidth) return;
    this.colours ??= palette();
    if (this.shape !== this.ranks.shape) this.arrange();
    const { context: c, place } = this;
    c.clearRect(0, 0, place.width, place.height);
    this.labels(c);
    if (this.measure === "status") this.statuses(c);
    else this.figures(c);
    this.rings(c);
    this.canvas.dataset.drawn = String(Number(this.canvas.dataset.drawn ?? 0) + 1);
    this.canvas.dataset.ms = (performance.now() - begun).toFixed(2);
    this.canvas.dataset.cells = String(this.ranks.length);
  }

  labels(c) {
    c.font = `11px ${this.colours.font}`;
    c.fillStyle = this.colours.muted;
    for (const label of this.place.labels) c.fillText(clipped(c, label.text, label.width), label.x, label.y);
  }

  statuses(c) {
    const { ranks, place, colours } = this;
    const inner = place.size - (place.size > 6 ? 1.5 : place.size > 4 ? 1 : 0.5);
    const rows = [[], [], [], [], [], []];
    for (let row = 0; row < ranks.length; row += 1) rows[ranks.status[row]]?.push(row);
    rows.forEach((members, status) => {
      c.fillStyle = colours.status[status];
      for (const row of members) cell(c, place.x[row], place.y[row], inner);
      c.fillStyle = c.strokeStyle = colours.mark[status];
      if (status && inner >= 4) for (const row of members) mark(c, status, place.x[row], place.y[row], inner);
    });
  }

  figures(c) {
    const { ranks, place, colours } = this;
    const scale = scaleOf(this.measure, ranks);
    const inner = place.size - (place.size > 6 ? 1.5 : place.size > 4 ? 1 : 0.5);
    for (let row = 0; row < ranks.length; row += 1) {
      const value = scale.value(ranks, row);
      const known = value !== null && value !== undefined;
      c.fillStyle = known ? ramped(colours, scale.place(value)) : colours.none;
      cell(c, place.x[row], place.y[row], inner);
    }
  }

  /** What must be found among thousands gets a ring: dead, suspect and slow ranks, cursor, selection. */
  rings(c) {
    const { ranks, place, colours } = this;
    if (place.size < 9 && this.measure === "status") {
      c.lineWidth = 1.5;
      for (let row = 0; row < ranks.length; row += 1) {
        const status = ranks.status[row];
        if (status !== 2 && status !== 3 && status !== 5) continue;
        c.strokeStyle = colours.mark[0];
        c.strokeRect(place.x[row] - 2.5, place.y[row] - 2.5, place.size + 4, place.size + 4);
      }
    }
    const around = (rank, width, colour) => {
      const row = ranks.rowOf.get(rank);
      if (row === undefined) return;
      c.lineWidth = width + 2;
      c.strokeStyle = colours.surface;
      c.strokeRect(place.x[row] - 2, place.y[row] - 2, place.size + 2.5, place.size + 2.5);
      c.lineWidth = width;
      c.strokeStyle = colour;
      c.strokeRect(place.x[row] - 2, place.y[row] - 2, place.size + 2.5, place.size + 2.5);
    };
    if (this.selected !== null) around(this.selected, 2.5, colours.focus);
    if (this.cursor !== null && this.cursor !== this.selected && document.activeElement === this.element) around(this.cursor, 2, colours.text);
  }

  // -- pointer and keyboard -------------------------------------------------------------------------

  listenTo() {
    this.element.addEventListener("pointermove", (event) => {
      const row = this.rowUnder(event);
      this.canvas.style.cursor = row >= 0 ? "pointer" : "default";
      if (row < 0 || event.pointerType === "touch") hideTip();
      else showTip(event.clientX, event.clientY, this.words(row));
    });
    this.element.addEventListener("pointerleave", hideTip);
    this.element.addEventListener("click", (event) => {
      const row = this.rowUnder(event);
      if (row >= 0) this.onselect(this.ranks.rank[row]);
    });
    this.element.addEventListener("keydown", (event) => this.key(event));
    for (const name of ["focus", "blur"]) this.element.addEventListener(name, () => this.draw());
  }

  rowUnder(event) {
    if (!this.place) return -1;
    const box = this.canvas.getBoundingClientRect();
    return cellAt(this.place, event.clientX - box.left, event.clientY - box.top);
  }

  key(event) {
    const { ranks } = this;
    if (!ranks.length || event.ctrlKey || event.metaKey || event.altKey) return;
    const row = ranks.rowOf.get(this.cursor) ?? ranks.rowOf.get(this.selected) ?? -1;
    const next = this.nextRow(event, row);
    if (next === null) return;
    event.preventDefault();
    event.stopPropagation();
    if (next >= 0) this.moveTo(next);
  }

  /** The row to go to; -1 for none, null where the key is none of ours. */
  nextRow(event, row) {
    const { ranks } = this;
    if (KEYS[event.key]) return row < 0 ? 0 : towards(this.place, row, ...KEYS[event.key]);
    if (event.key === "Home") return 0;
    if (event.key === "End") return ranks.length - 1;
    if (event.key === "n" || event.key === "N") return this.nextNotOk(row, event.shiftKey ? -1 : 1);
    if (event.key === "Enter" || event.key === " ") {
      if (row >= 0) this.onselect(ranks.rank[row]);
      return -1;
    }
    if (event.key === "Escape" && this.selected !== null) {
      this.onselect(null);
      return -1;
    }
    return null;
  }

  nextNotOk(row, step) {
    const n = this.ranks.length;
    for (let i = 1; i <= n; i += 1) {
      const at = (((row < 0 ? -1 : row) + i * step) % n + n) % n;
      if (this.ranks.status[at] > 1) return at;
    }
    return -1;
  }

  moveTo(row) {
    this.cursor = this.ranks.rank[row];
    if (this.selected !== null) this.onselect(this.cursor); // the panel follows
    setText(this.said, this.words(row).join(", "));
    const top = this.canvas.getBoundingClientRect().top + this.place.y[row];
    if (top < 60 || top > innerHeight - 80) scrollBy({ top: top - innerHeight / 2 });
    this.draw();
  }

  words(row) {
    const { ranks } = this;
    const lines = [`Rank ${ranks.rank[row]} · ${statusOf(ranks.status[row]).word}`, `${ranks.nodeName(row)}${ranks.mesh ? ` · ${ranks.place(row)}` : ""}`];
    const measure = MEASURES[this.measure];
    if (measure.words) lines.push(`${measure.title}: ${measure.words(measure.value(ranks, row))}`);
    if (ranks.pending[row]) lines.push(`in ${ranks.pending[row]}`);
    return lines;
  }
}

function cell(c, x, y, size) {
  c.fillRect(x, y, size, size);
}

/** A shape for each status but ok, so that no colour has to be told from another. */
function mark(c, status, x, y, size) {
  const at = (u, v) => [x + u * size, y + v * size];
  c.lineWidth = Math.max(1, size / 8);
  c.beginPath();
  if (status === 1) c.rect(...at(0.38, 0.38), size * 0.24, size * 0.24);
  if (status === 2) { c.moveTo(...at(0.5, 0.18)); c.lineTo(...at(0.85, 0.8)); c.lineTo(...at(0.15, 0.8)); c.closePath(); }
  if (status === 3) { c.moveTo(...at(0.2, 0.2)); c.lineTo(...at(0.8, 0.8)); c.moveTo(...at(0.8, 0.2)); c.lineTo(...at(0.2, 0.8)); }
  if (status === 4) { c.moveTo(...at(0, 0.5)); c.lineTo(...at(0.5, 0)); c.moveTo(...at(0, 1)); c.lineTo(...at(1, 0)); c.moveTo(...at(0.5, 1)); c.lineTo(...at(1, 0.5)); }
  if (status === 5) c.rect(...at(0.15, 0.36), size * 0.7, size * 0.28);
  if (status === 3 || status === 4) c.stroke();
  else c.fill();
}

function clipped(c, text, width) {
  if (c.measureText(text).width <= width) return text;
  let end = text.length;
  while (end > 1 && c.measureText(`${text.slice(0, end)}…`).width > width) end -= 1;
  return `${text.slice(0, end)}…`;
}
