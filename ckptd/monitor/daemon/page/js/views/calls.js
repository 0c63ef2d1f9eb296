// Collectives of some ranks over the last seconds: who entered what when, and who still waits.

import { get } from "../api.js";
import { legend } from "../charts.js";
import { choice, h, nothing, refill, setText } from "../dom.js";
import { bytes, clock, count, plural, seconds } from "../format.js";
import { palette } from "../scale.js";
import { store } from "../store.js";
import { hideTip, showTip } from "../tip.js";

const AGAIN_MS = 2000;
const LABEL = 64;
const ROW = 22;
const BOTTOM = 22;

export function calls(root) {
  let span = 10, wanted = "0-15", paused = false, answer = null, boxes = [], at = -1;
  const field = h("input", { id: "calls-ranks", value: wanted, size: "10", inputmode: "text", spellcheck: "false", pattern: "[0-9,\\- ]+" });
  const said = h("p", { class: "form-error", role: "alert" });
  const summary = h("p", { class: "summary" });
  const canvas = h("canvas", { class: "timeline", tabindex: "0", role: "application", "aria-roledescription": "timeline", "aria-label": "Calls by rank. Arrow keys go from call to call." });
  const heard = h("p", { class: "hidden", role: "status", "aria-live": "polite" });
  const box = h("div", { class: "timeline-box" }, canvas, heard);
  const key = h("div", {});
  const empty = nothing("No call in this time", "Calls appear here once ranks with a recorder report. A report holds only the last calls of each rank, so a busy job shows gaps.");
  const pause = h("button", { type: "button", class: "small", "aria-pressed": "false", onclick: () => {
    paused = !paused;
    pause.setAttribute("aria-pressed", String(paused));
    setText(pause, paused ? "Go on" : "Pause");
    if (!paused) load();
  } }, "Pause");
  const trace = h("a", { class: "button small", download: "trace.json" }, "Chrome trace");
  root.append(h("div", { class: "view-head" }, h("h1", {}, "Calls"), summary,
    h("form", { class: "controls", onsubmit: (event) => { event.preventDefault(); wanted = field.value.replaceAll(" ", ""); load(); } },
      h("label", { for: "calls-ranks" }, "Ranks"), field,
      choice("Time shown", [["2", "2 s"], ["10", "10 s"], ["60", "60 s"]], "10", (s) => { span = Number(s); load(); }), pause, trace)),
  said, h("div", { class: "panel timeline-panel" }, empty, box, key));
  const timer = setInterval(() => { if (!paused && !document.hidden && store.connection.state === "live") load(); }, AGAIN_MS);
  const resized = new ResizeObserver(draw);
  resized.observe(box);
  addEventListener("themechange", draw);

  async function load() {
    trace.href = `api/v1/trace?seconds=${Math.max(30, span)}&ranks=${encodeURIComponent(wanted)}`;
    try {
      answer = await get(`collectives?seconds=${span}&ranks=${encodeURIComponent(wanted)}&limit=5000`);
      for (const rank of answer.ranks) endUnseen(rank.calls, answer.now);
      setText(said, "");
    } catch (error) {
      if (error.status === 400) setText(said, "Write ranks as 0-7,12.");
      return;
    }
    draw();
  }

  function draw() {
    if (!answer) return;
    const total = answer.ranks.reduce((n, r) => n + r.calls.length, 0);
    empty.hidden = total > 0;
    box.hidden = key.hidden = total === 0;
    setText(summary, total ? `${plural(total, "call")} of ${plural(answer.ranks.length, "rank")} in ${seconds(span)}${answer.cut ? ", older ones left out" : ""}` : "");
    const width = box.clientWidth;
    if (!total || !width) return;
    const ops = [...new Set(answer.ranks.flatMap((r) => r.calls.map((c) => c.op)))].sort();
    refill(key, ops.join(), () => [legend(ops), h("p", { class: "quietly" }, "A bar goes from entering a call to its end. Hatched: not completed, or failed. A thin line: end unknown, and lies on the line. Rows are ranks, on the daemon's clock: the ages of nodes are joined with the delay of their sheets.")]);
    paint(width, ops);
  }

  function paint(width, ops) {
    const height = answer.ranks.length * ROW + BOTTOM;
    const dense = devicePixelRatio || 1;
    canvas.width = Math.round(width * dense);
    canvas.height = Math.round(height * dense);
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
    const c = canvas.getContext("2d");
    c.setTransform(dense, 0, 0, dense, 0, 0);
    const colours = palette();
    const x = (t) => LABEL + (1 + (t - answer.now) / span) * (width - LABEL - 4);
    c.font = `11px ${colours.font}`;
    grid(c, colours, width, height, x);
    boxes = [];
    answer.ranks.forEach((rank, i) => {
      const y = i * ROW + 4;
      c.fillStyle = colours.muted;
      c.fillText(`rank ${rank.rank}`, 0, y + 11);
      for (const call of rank.calls) {
        const from = Math.max(LABEL, x(call.start_s));
        const to = x(call.until ?? call.end_s ?? answer.now);
        if (to < LABEL) continue;
        const wide = Math.max(1.5, to - from - 0.5);
        c.fillStyle = colours.series[ops.indexOf(call.op) % 8];
        const unseen = call.until !== undefined;
        c.fillRect(from, unseen ? y + ROW / 2 - 5 : y, wide, unseen ? 2 : ROW - 8);
        if (!unseen && (call.end_s === null || call.failed)) hatch(c, colours, from, y, wide, ROW - 8);
        boxes.push({ x: from, y, w: wide, rank: rank.rank, call });
      }
    });
    if (at >= boxes.length) at = -1;
    if (at >= 0 && document.activeElement === canvas) {
      c.strokeStyle = colours.focus;
      c.lineWidth = 2;
      c.strokeRect(boxes[at].x - 2, boxes[at].y - 2, Math.max(6, boxes[at].w + 4), ROW - 4);
    }
  }

  function grid(c, colours, width, height, x) {
    const step = { 2: 0.5, 10: 2, 60: 10 }[span];
    for (let back = 0; back <= span; back += step) {
      const at = x(answer.now - back);
      c.fillStyle = colours.line;
      c.fillRect(Math.round(at), 0, 1, height - BOTTOM);
      c.fillStyle = colours.muted;
      c.textAlign = back ? "center" : "right";
      if (at > LABEL + 10 || !back) c.fillText(back ? `−${back} s` : clock(answer.now), at, height - 6);
    }
    c.textAlign = "left";
  }

  const words = ({ rank, call }) => [`${call.op} · rank ${rank}`, `${call.kind ? `${call.kind} · ` : ""}${call.group} #${count(call.seq)}`,
    call.unseen ? "end unknown" : call.until !== undefined ? "its end was not seen"
      : call.end_s === null ? `${call.queued ? "its device has not reached it" : "not completed"} for ${seconds(answer.now - call.start_s)}` : `${seconds(call.end_s - call.start_s)}${call.failed ? ", failed" : ""}`,
    [bytes(call.bytes), call.step === null ? null : `step ${count(call.step)}`, call.phase?.toLowerCase()].filter((t) => t && t !== "–").join(" · "), call.site].filter(Boolean);

  canvas.addEventListener("pointermove", (event) => {
    const bounds = canvas.getBoundingClientRect();
    const [px, py] = [event.clientX - bounds.left, event.clientY - bounds.top];
    const hit = boxes.findLast((b) => px >= b.x - 1 && px <= b.x + b.w + 1 && py >= b.y && py <= b.y + ROW - 8);
    if (hit) showTip(event.clientX, event.clientY, words(hit));
    else hideTip();
  });
  canvas.addEventListener("pointerleave", hideTip);
  canvas.addEventListener("keydown", (event) => {
    if (!boxes.length || !/^Arrow/.test(event.key)) return;
    event.preventDefault();
    if (event.key === "ArrowRight" || event.key === "ArrowLeft") at = Math.min(boxes.length - 1, Math.max(0, at + (event.key === "ArrowRight" ? 1 : -1)));
    else {
      const down = event.key === "ArrowDown";
      const here = boxes[Math.max(0, at)];
      const next = boxes.map((b, i) => [i, b]).filter(([, b]) => b.y === here.y + (down ? ROW : -ROW)).sort((a, b) => Math.abs(a[1].x - here.x) - Math.abs(b[1].x - here.x))[0];
      if (next) at = next[0];
    }
    setText(heard, words(boxes[at]).join(", "));
    draw();
  });
  for (const name of ["focus", "blur"]) canvas.addEventListener(name, draw);

  load();
  return { end: () => { clearInterval(timer); resized.disconnect(); removeEventListener("themechange", draw); hideTip(); } };
}

/**
 * A call of which no sheet told the end is over when a later one of its group was told: what is
 * not known is when. It is shown until that one began. So is a call whose device does not say when
 * it ends, and the last of these until now: it may go on.
 */
function endUnseen(calls, now) {
  const next = new Map();
  for (const call of calls.slice().sort((a, b) => b.seq - a.seq)) {
    const later = next.get(call.group);
    if (later && (call.unseen || call.end_s === null)) call.until = Math.max(call.start_s, later.start_s);
    else if (call.unseen) call.until = now;
    next.set(call.group, call);
  }
}

function hatch(c, colours, x, y, w, height) {
  c.save();
  c.beginPath();
  c.rect(x, y, w, height);
  c.clip();
  c.strokeStyle = colours.surface;
  c.lineWidth = 1.5;
  c.beginPath();
  for (let at = x - height; at < x + w; at += 6) { c.moveTo(at, y + height); c.lineTo(at + height, y); }
  c.stroke();
  c.restore();
}
