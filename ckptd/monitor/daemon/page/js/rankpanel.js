// All that is known of one rank.

import { get, post } from "./api.js";
import { h, refill, setText, table } from "./dom.js";
import { bytes, clock, count, plural, ratio, seconds } from "./format.js";
import { listen, store } from "./store.js";
import { PROCESS, shape, statusOf } from "./words.js";

const AGAIN_MS = 2000;
const CALLS_SHOWN = 16;

export class RankPanel {
  constructor(onclose) {
    this.rank = null;
    this.facts = h("dl", { class: "facts" });
    this.more = h("div", { class: "rank-more" });
    this.title = h("h2", { id: "rank-title", tabindex: "-1" });
    this.close = h("button", { type: "button", class: "quiet", "aria-label": "Close rank", onclick: onclose }, "✕");
    this.element = h("aside", { class: "panel rank-panel", "aria-labelledby": "rank-title", hidden: true },
      h("div", { class: "panel-head" }, this.title, this.close), this.facts, this.more);
    this.element.addEventListener("keydown", (event) => { if (event.key === "Escape") onclose(); });
    this.ends = listen(["ranks"], () => this.drawFacts());
    this.timer = setInterval(() => this.load(), AGAIN_MS);
  }

  end() {
    this.ends();
    clearInterval(this.timer);
  }

  show(rank) {
    if (this.rank === rank) return;
    this.rank = rank;
    this.used = null;
    this.element.hidden = rank === null;
    if (rank === null) return;
    this.more.replaceChildren();
    delete this.more.dataset.key;
    this.drawFacts();
    this.load();
  }

  drawFacts() {
    const { ranks } = store;
    const row = ranks.rowOf.get(this.rank);
    if (this.rank === null) return;
    const title = `Rank ${this.rank}`;
    if (row === undefined) {
      refill(this.title, title, () => [title]);
      refill(this.facts, "none", () => [h("dt", {}, "state"), h("dd", {}, "does not report")]);
      return;
    }
    const status = ranks.status[row], used = this.used;
    refill(this.title, `${title}${status}`, () => [title, h("span", { class: "state-word" }, shape(status), statusOf(status).word)]);
    const facts = [
      ["node", ranks.nodeName(row)],
      ...(ranks.mesh ? [["place", ranks.place(row)]] : []),
      ["process id", ranks.pid[row] ? String(ranks.pid[row]) : "unknown"],
      ["process", ranks.alive[row] ? PROCESS[ranks.state[row]] ?? "runs" : ended(ranks.exit_code[row])],
      ["phase", String(ranks.phase[row]).toLowerCase()],
      ["step", ranks.step[row] < 0 ? "not marked" : count(ranks.step[row])],
      ["moved", `${seconds(ranks.age("progress_age_s", row))} ago`],
      ["heartbeat", ranks.heartbeat_age_s[row] === null ? "none" : `${seconds(ranks.age("heartbeat_age_s", row))} ago`],
      ["in call", ranks.pending[row] ? `${ranks.pending[row]}, since ${seconds(ranks.age("pending_age_s", row))}` : "none"],
      ["self time", `${seconds(ranks.self_s[row])} a step`],
      ["score", ranks.score[row] === null ? "–" : `${ratio(ranks.score[row])} of its like`],
      ["CPU", !used || used.cpu === null ? "–" : `${used.cpu.toFixed(2)} cores, ${plural(used.threads, "thread")}`],
      ["memory", used?.memory ? `${bytes(used.memory)} resident` : "–"],
    ];
    const grew = refill(this.facts, facts.map(([k]) => k).join(), () => facts.map(([k]) => [h("dt", {}, k), h("dd", {})]));
    const cells = this.facts.querySelectorAll("dd");
    facts.forEach(([, text], i) => setText(cells[i], text));
    return grew;
  }

  async load() {
    if (this.rank === null || document.hidden || store.connection.state !== "live") return;
    const rank = this.rank;
    try {
      const answer = await get(`ranks/${rank}`);
      if (this.rank === rank) this.drawMore(answer);
    } catch (error) {
      if (this.rank === rank) refill(this.more, `e${error.message}`, () => [h("p", { class: "quietly" }, `Groups and calls: ${error.message}.`)]);
    }
  }

  /** Has the stack and the last output taken; they come with one of the next answers. */
  async look() {
    const rank = this.rank;
    this.asked = { rank, before: this.used.looked_at };
    this.drawMore(this.used);
    try {
      await post(`ranks/${rank}/look`, {});
    } catch (error) {
      this.asked = { rank, error: error.message };
    }
    this.drawMore(this.used);
  }

  asking(answer) {
    const { rank, before, error } = this.asked ?? {};
    const taken = answer.looked_at === null ? "" : `taken at ${clock(answer.looked_at)}`;
    if (rank !== this.rank) return taken;
    return error ?? (answer.looked_at > (before ?? 0) + 0.01 ? taken : "asked; its agent answers with its next reports");
  }

  drawMore(answer) {
    this.used = answer;
    this.drawFacts();
    const said = this.asking(answer);
    const groups = answer.groups ?? [], calls = (answer.calls ?? []).slice(-CALLS_SHOWN).reverse();
    const key = JSON.stringify([groups, calls.map((c) => [c.seq, c.group, c.end_s === null]), answer.stack, answer.log, said]);
    refill(this.more, key, () => [
      h("p", { class: "button-row", role: "status" }, h("button", { type: "button", class: "small", id: "look", onclick: () => this.look() }, "Take stack and last output"), h("span", { class: "quietly" }, said)),
      answer.log ? [h("h3", {}, "Last output"), h("pre", { class: "stack", tabindex: "0", "aria-label": "Last output" }, answer.log)] : null,
      answer.stack ? [h("h3", {}, answer.stack.incident ? ["Stack, taken for ", h("a", { href: `#/incidents/${encodeURIComponent(answer.stack.incident)}` }, answer.stack.incident)] : "Stack, taken on request"), h("pre", { class: "stack", tabindex: "0", "aria-label": "Stack" }, answer.stack.text)] : null,
      h("h3", {}, plural(groups.length, "group")),
      table(["Group", ">Size", ">Entered", ">Completed"], groups.map((g) => ({
        properties: g.entered > g.completed ? { class: "behind" } : {},
        cells: [h("span", { class: "mono clip", title: g.name }, g.kind ? `${g.kind} · ${g.name}` : g.name), count(g.size), count(g.entered), count(g.completed)],
      })), "Groups of the rank"),
      h("h3", {}, "Last calls"),
      calls.length ? table(["Call", ">No.", ">Size", ">Took"], calls.map((c) => ({
        properties: c.end_s === null ? { class: "behind" } : {},
        cells: [h("span", { class: "clip", title: `${c.op} in ${c.group}, site ${c.site ?? "unknown"}, step ${c.step ?? "unknown"}` }, c.op), count(c.seq), bytes(c.bytes), c.end_s === null ? "pending" : seconds(c.end_s - c.start_s)],
      })), "Last calls of the rank, the newest first") : h("p", { class: "quietly" }, "None was seen."),
    ].flat().filter(Boolean));
  }
}

export function ended(code) {
  if (code === null || code === undefined) return "ended";
  return code < 0 ? `ended by signal ${-code}` : `ended with exit code ${code}`;
}
