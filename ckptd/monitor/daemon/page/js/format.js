// Words for numbers. A missing value is an en dash everywhere.

const NONE = "–";
const missing = (v) => v === null || v === undefined || Number.isNaN(v);

export function count(value) {
  return missing(value) ? NONE : Math.round(value).toLocaleString("en-US");
}

/** A time with three digits: 1.24 s, 340 ms, 52 µs; from 100 s on in minutes, hours, days. */
export function seconds(value) {
  if (missing(value)) return NONE;
  const sign = value < 0 ? "−" : "";
  const v = Math.abs(value);
  if (v === Infinity) return `${sign}∞`;
  if (v < 1e-9) return "0 s";
  if (v < 0.9995e-3) return `${sign}${digits(v * 1e6)} µs`;
  if (v < 0.9995) return `${sign}${digits(v * 1e3)} ms`;
  if (v < 99.95) return `${sign}${digits(v)} s`;
  if (v < 5400) return `${sign}${Math.floor(v / 60)} min ${pad(Math.floor(v % 60))} s`;
  if (v < 172800) return `${sign}${Math.floor(v / 3600)} h ${pad(Math.floor((v % 3600) / 60))} min`;
  return `${sign}${Math.floor(v / 86400)} d ${Math.floor((v % 86400) / 3600)} h`;
}

const pad = (n) => String(n).padStart(2, "0");
const digits = (v) => (v >= 99.95 ? v.toFixed(0) : v >= 9.995 ? v.toFixed(1) : v.toFixed(2));

export function bytes(value) {
  if (missing(value) || value < 0) return NONE;
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let v = value, unit = 0;
  while (v >= 1023.5 && unit < units.length - 1) { v /= 1024; unit += 1; }
  return unit === 0 ? `${v} B` : `${v >= 99.95 ? v.toFixed(0) : v >= 9.995 ? v.toFixed(1) : v.toFixed(2)} ${units[unit]}`;
}

export function percent(value, places = 0) {
  return missing(value) ? NONE : `${(100 * value).toFixed(places)} %`;
}

export function ratio(value) {
  return missing(value) ? NONE : `×${value.toFixed(2)}`;
}

/** A figure of unknown kind, from a verdict's numbers. */
export function figure(value) {
  if (missing(value)) return NONE;
  if (Number.isInteger(value)) return value.toLocaleString("en-US");
  const v = Math.abs(value);
  return v >= 1e5 || v < 1e-3 ? value.toExponential(2) : String(Number(value.toPrecision(4)));
}

/** Time of day of unix seconds; with its date where that is not today. */
export function clock(unix) {
  if (missing(unix)) return NONE;
  const at = new Date(unix * 1000);
  const time = [at.getHours(), at.getMinutes(), at.getSeconds()].map(pad).join(":");
  if (at.toDateString() === new Date().toDateString()) return time;
  return `${at.getFullYear()}-${pad(at.getMonth() + 1)}-${pad(at.getDate())} ${time}`;
}

export function plural(n, one, many = `${one}s`) {
  return `${count(n)} ${n === 1 ? one : many}`;
}

export function sentence(text) {
  return text ? text[0].toUpperCase() + text.slice(1) : text;
}
