// Colours of cells: statuses from the style sheet, figures on cividis, which reads the same with
// any kind of colour vision and in print.

import { STATUSES } from "./words.js";
import { count, ratio, seconds } from "./format.js";

// cividis at ten even steps (Nuñez, Anderton, Renslow 2018)
const CIVIDIS = [[0, 34, 78], [18, 53, 112], [59, 73, 108], [87, 93, 109], [112, 113, 115],
  [138, 134, 120], [165, 156, 116], [195, 179, 105], [225, 204, 85], [254, 232, 56]];
const STEPS = 64;

function cividis(t) {
  const at = Math.min(0.9999, Math.max(0, t)) * (CIVIDIS.length - 1);
  const [low, high] = [CIVIDIS[Math.floor(at)], CIVIDIS[Math.floor(at) + 1]];
  return `rgb(${low.map((v, i) => Math.round(v + (high[i] - v) * (at % 1))).join(" ")})`;
}

export function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

/** Colours of the style sheet by name; read once for each drawing. */
export function palette() {
  const style = getComputedStyle(document.documentElement);
  const of = (name) => style.getPropertyValue(`--${name}`).trim();
  const dark = isDark();
  // Little is near the background, much far from it, in both themes.
  const ramp = Array.from({ length: STEPS }, (_, i) => {
    const t = i / (STEPS - 1);
    return cividis(dark ? 0.12 + 0.88 * t : 0.97 - 0.97 * t);
  });
  return {
    dark, ramp, of, status: STATUSES.map((s) => of(`s-${s.key}`)), mark: STATUSES.map((s) => of(`m-${s.key}`)),
    text: of("text"), muted: of("muted"), line: of("line"), surface: of("surface"), focus: of("focus"), none: of("none"),
    series: Array.from({ length: 8 }, (_, i) => of(`c${i}`)), font: style.fontFamily || "sans-serif",
  };
}

export const ramped = (colours, t) => colours.ramp[Math.round(Math.min(1, Math.max(0, t)) * (STEPS - 1))];

const logPlace = (low, high) => (v) => (Math.log(Math.max(v, low)) - Math.log(low)) / (Math.log(high) - Math.log(low));

/** What cells can be coloured by: a value of each row, its place on the ramp from 0 to 1, its words. */
export const MEASURES = {
  status: { title: "Status", value: (ranks, row) => ranks.status[row] },
  age: {
    title: "Progress age", value: (ranks, row) => ranks.age("progress_age_s", row),
    place: () => logPlace(0.1, 600), ticks: [0.1, 1, 10, 60, 600], words: seconds,
    says: "seconds since anything of the rank moved",
  },
  score: {
    title: "Score", value: (ranks, row) => ranks.score[row],
    place: () => (v) => (v - 0.8) / 0.8, ticks: [0.8, 1, 1.2, 1.4, 1.6], words: ratio,
    says: "self time against ranks with the same role",
  },
  self: {
    title: "Self time", value: (ranks, row) => ranks.self_s[row],
    place: (low, high) => (high > low ? (v) => (v - low) / (high - low) : () => 0.3), words: seconds,
    says: "own time in a step, outside collectives",
  },
};

/** Return the scale of a measure over the rows as they are: `place` and `ticks`. */
export function scaleOf(key, ranks) {
  const measure = MEASURES[key];
  if (measure.ticks) return { ...measure, place: measure.place(), count };
  const values = Array.from({ length: ranks.length }, (_, i) => measure.value(ranks, i)).filter((v) => v !== null && v !== undefined);
  values.sort((a, b) => a - b);
  // One rank ten times slower must not flatten all others.
  const low = values[Math.floor(values.length * 0.01)] ?? 0;
  const high = Math.max(values[Math.ceil(values.length * 0.995) - 1] ?? 1, low * 1.2, 1e-9);
  const ticks = values.length ? [0, 1, 2, 3, 4].map((i) => low + ((high - low) * i) / 4) : [];
  return { ...measure, place: measure.place(low, high), ticks };
}
