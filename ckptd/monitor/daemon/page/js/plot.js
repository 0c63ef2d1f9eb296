// A chart of uPlot in the page's colours: lines, marks of what happened, zoom by mouse and by keys.

import { h, refill, setText } from "./dom.js";
import { palette } from "./scale.js";
import { hideTip, showTip } from "./tip.js";

const FONT = 11;

export class Plot {
  /**
   * `words(value)` says a value. `onzoom(from, to)` is called when somebody chooses a range, `onkey(name)`
   * for "left", "right", "in", "out" and "reset". `xwords(x)` says where the pointer is, where x is no time.
   */
  constructor(title, { words, height = 150, onzoom = null, onkey = () => {}, xwords = null, least = null, aside = null }) {
    Object.assign(this, { title, words, height, onzoom, onkey, xwords, least });
    this.box = h("div", { class: "plot", tabindex: "0", role: "application", "aria-roledescription": "chart", "aria-label": title });
    this.names = h("ul", { class: "legend plot-names" });
    this.empty = h("p", { class: "quietly", hidden: true }, "Nothing recorded in this time.");
    this.element = h("section", { class: "panel plot-panel", "aria-label": title },
      h("div", { class: "panel-head" }, h("h2", {}, title), this.names, aside), this.box, this.empty);
    this.chart = this.data = null;
    this.held = false;
    this.box.addEventListener("keydown", (event) => this.key(event));
    this.resized = new ResizeObserver(() => { if (this.data && this.box.clientWidth !== this.chart?.width) this.draw(); });
    this.resized.observe(this.box);
    this.themed = () => { this.drawn = ""; this.draw(); };
    addEventListener("themechange", this.themed);
  }

  end() {
    this.resized.disconnect();
    removeEventListener("themechange", this.themed);
    this.chart?.destroy();
    hideTip();
  }

  key(event) {
    const name = { ArrowLeft: "left", ArrowRight: "right", ArrowUp: "in", "+": "in", "=": "in", ArrowDown: "out", "-": "out", Escape: "reset" }[event.key];
    if (!name || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    this.onkey(name);
  }

  /** `x` rises; `series` are {name, values, colour, dash, dots}; `marks` are {at, until, colour, shape, text}. */
  set({ x, series, marks = [], from = null, to = null }) {
    const shown = series.filter((s) => s.values.some((v) => v !== null));
    // Of a time in which nothing was recorded the axes stay: a move by keys goes on from there.
    this.data = { x, series: shown.length || !this.chart ? shown : series, marks, from: from ?? x[0], to: to ?? x.at(-1) };
    this.draw();
  }

  draw() {
    if (this.held) return; // somebody chooses a range: it is drawn when they are done
    const { data } = this;
    const some = data && data.series.length > 0 && data.to > data.from;
    this.empty.hidden = !data || (some && data.x.length > 0);
    this.box.hidden = !some;
    const key = some ? data.series.map((s) => `${s.name}${s.colour}`).join() : "";
    refill(this.names, key, () => (some ? data.series.map((s) => h("li", {},
      h("i", { class: `line-mark series-line-${s.colour} ${s.dash ? "dashed" : ""}`, "aria-hidden": "true" }), s.name, h("b", {}))) : []));
    const width = this.box.clientWidth;
    if (some && !width) return; // it is not shown now, and drawn when it is
    if (some) this.say(null);
    // A chart that somebody points at stays: it gets other points.
    if (some && this.chart && this.drawn === `${key}${width}`) {
      this.chart.setData([data.x, ...data.series.map((s) => s.values)]);
      return;
    }
    this.chart?.destroy();
    this.chart = null;
    if (!some) return;
    this.drawn = `${key}${width}`;
    this.chart = new uPlot(this.options(width), [data.x, ...data.series.map((s) => s.values)], this.box);
    this.chart.over.addEventListener("pointerleave", () => { hideTip(); this.say(null); });
    this.chart.over.addEventListener("pointermove", (event) => this.tip(event));
    this.chart.over.addEventListener("pointerdown", () => {
      this.held = true;
      addEventListener("pointerup", () => setTimeout(() => { this.held = false; this.draw(); }), { once: true });
    });
    this.chart.over.addEventListener("dblclick", () => this.onkey("reset"));
    this.chart.over.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey) return; // the page scrolls
      event.preventDefault();
      this.onkey(event.deltaY < 0 ? "in" : "out");
    }, { passive: false });
  }

  options(width) {
    const colours = palette();
    const font = `${FONT}px ${colours.font}`;
    const axis = { stroke: colours.muted, font, grid: { stroke: colours.line, width: 1 }, ticks: { show: false }, gap: 6 };
    const { data } = this;
    return {
      width, height: this.height, legend: { show: false }, padding: [10, 22, 0, 0],
      cursor: { drag: { x: Boolean(this.onzoom), y: false, setScale: false }, points: { size: 6 }, y: false },
      scales: {
        x: { time: !this.xwords, range: () => [this.data.from, this.data.to] },
        y: { range: (_, low, high) => spread(this.least === null ? low : Math.min(low, this.least), high) },
      },
      axes: [{ ...axis, size: 24, space: 90, values: this.xwords ? (_, all) => all.map((v) => this.xwords(v)) : (_, all, __, ___, step) => all.map((v) => timeText(v, step)) },
        { ...axis, size: 58, space: 32, values: (_, all) => all.map((v) => this.words(v).replace(/(\.\d*?)0+(?=\D|$)/, "$1").replace(/\.(?=\D|$)/, "")) }],
      series: [{}, ...data.series.map((s) => ({
        stroke: colours.series[s.colour], width: 1.5, dash: s.dash ? [5, 4] : undefined,
        paths: s.dots ? uPlot.paths.bars({ size: [0.9, 5], align: 0 }) : undefined, fill: s.dots ? colours.series[s.colour] : undefined,
        points: { show: s.dots ? false : undefined, size: 4 },
      }))],
      hooks: {
        drawAxes: [(u) => paintMarks(u, this.data.marks, colours)],
        setSelect: [(u) => {
          if (u.select.width < 4) return;
          this.onzoom(u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x"));
        }],
      },
    };
  }

  /** Values at one place beside the names; those of the newest point without one. */
  say(at) {
    const { x, series } = this.data;
    [...this.names.children].forEach((li, i) => {
      const values = series[i].values;
      const value = at === null ? values.findLast((v) => v !== null) : values[at];
      setText(li.lastChild, value === null || value === undefined ? "–" : this.words(value));
    });
    if (at === null) this.box.setAttribute("aria-label", `${this.title}: ${x.length} points, newest ${series.map((s, i) => `${s.name} ${this.names.children[i].lastChild.textContent}`).join(", ")}. Arrow keys move and zoom.`);
  }

  tip(event) {
    const u = this.chart, { data } = this;
    const at = u.posToVal(event.offsetX, "x"), near = Math.abs(u.posToVal(6, "x") - u.posToVal(0, "x"));
    const index = u.posToIdx(event.offsetX);
    if (index === null || !data.x.length) return;
    this.say(index);
    const where = this.xwords ? this.xwords(data.x[index]) : new Date(data.x[index] * 1000).toLocaleTimeString([], { hour12: false });
    const marks = data.marks.filter((m) => at >= m.at - near && at <= (m.until ?? m.at) + near).map((m) => m.text);
    showTip(event.clientX, event.clientY, [where, ...data.series.map((s) => `${s.name} ${s.values[index] === null ? "–" : this.words(s.values[index])}`), ...marks.slice(0, 5)]);
  }
}

/** Room above and below a line, and never a line that is flat because it fills the chart with noise. */
function spread(low, high) {
  if (low === null || high === null) return [0, 1];
  const room = Math.max(high - low, Math.abs(high) * 0.1, 1e-9);
  const below = low >= 0 ? Math.max(0, low - 0.15 * room) : low - 0.15 * room;
  return [below, high + 0.2 * room];
}

const two = (n) => String(n).padStart(2, "0");

function timeText(x, step) {
  const at = new Date(x * 1000);
  if (step >= 86400) return `${at.getDate()} ${at.toLocaleString("en", { month: "short" })}`;
  const day = at.getHours() === 0 && at.getMinutes() === 0 && step >= 3600;
  if (day) return `${at.getDate()} ${at.toLocaleString("en", { month: "short" })}`;
  return `${two(at.getHours())}:${two(at.getMinutes())}${step < 60 ? `:${two(at.getSeconds())}` : ""}`;
}

/** Marks stand behind the lines: a band where something lasted, a line where it happened, a shape on top. */
function paintMarks(u, marks, colours) {
  const { ctx: c } = u, { left, top, width, height } = u.bbox, dense = devicePixelRatio || 1;
  c.save();
  c.beginPath();
  c.rect(left, top - 10 * dense, width, height + 10 * dense);
  c.clip();
  for (const mark of marks) {
    const x = u.valToPos(mark.at, "x", true), end = u.valToPos(mark.until ?? mark.at, "x", true);
    if (end < left || x > left + width) continue;
    c.fillStyle = c.strokeStyle = colours.of(mark.colour);
    c.lineWidth = dense;
    if (mark.shape === "save") {
      c.fillRect(Math.round(x), top + height - 6 * dense, dense * 1.5, 6 * dense);
      continue;
    }
    if (end > x) {
      c.globalAlpha = 0.13;
      c.fillRect(x, top, Math.max(end - x, 2 * dense), height);
      c.globalAlpha = 1;
    }
    c.setLineDash(mark.shape === "restart" ? [3 * dense, 3 * dense] : []);
    c.beginPath();
    c.moveTo(x, top);
    c.lineTo(x, top + height);
    c.stroke();
    c.setLineDash([]);
    const r = 4.5 * dense, y = top - 3 * dense;
    c.beginPath();
    if (mark.shape === "restart") c.rect(x - r * 0.7, y - r * 0.7, r * 1.4, r * 1.4);
    else { c.moveTo(x, y - r); c.lineTo(x + r, y + r * 0.8); c.lineTo(x - r, y + r * 0.8); c.closePath(); }
    c.fill();
  }
  c.restore();
}

/**
 * The points at which something is known, and a hole where nothing was for longer than usual: nobody should
 * see a line through a time that nobody saw.
 */
export function known(at, columns, gap = 0) {
  const kept = at.map((_, i) => i).filter((i) => columns.some((c) => c[i] !== null && c[i] !== undefined));
  const x = [], out = columns.map(() => []);
  const apart = kept.slice(1).map((k, i) => at[k] - at[kept[i]]).sort((a, b) => a - b);
  const most = Math.max(5 * (apart[Math.floor(apart.length / 2)] ?? 0), gap, 5);
  kept.forEach((i, n) => {
    if (n && at[i] - at[kept[n - 1]] > most) {
      x.push(at[kept[n - 1]] + 1e-3);
      out.forEach((o) => o.push(null));
    }
    x.push(at[i]);
    out.forEach((o, k) => o.push(columns[k][i] ?? null));
  });
  return [x, out];
}
