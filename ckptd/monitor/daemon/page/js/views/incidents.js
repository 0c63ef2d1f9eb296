// Incidents and their evidence.

import { get, post } from "../api.js";
import { choice, h, nothing, refill, setText, table } from "../dom.js";
import { clock, count, figure, percent, plural, seconds, sentence } from "../format.js";
import { listen, store } from "../store.js";
import { shape } from "../words.js";

const FILTERS = [["all", "All"], ["open", "Open"], ["closed", "Closed"]];
const STATUS_OF_KIND = { crash: 3, "slow rank": 5, "slow link": 5, "cannot say": 4 };

export function incidents(root) {
  const list = h("ul", {});
  const detail = h("div", { class: "incident-detail" });
  let filter = "all", chosen = null, whole = null;
  root.append(h("div", { class: "view-head" }, h("h1", {}, "Incidents"), h("p", { class: "summary", id: "incidents-summary" }),
    h("div", { class: "controls" }, choice("Show", FILTERS, filter, (f) => { filter = f; drawList(); }))),
  h("div", { class: "master" }, h("div", { class: "panel incident-list", role: "region", "aria-label": "List of incidents" }, list), detail));
  const offs = [listen(["incidents"], () => { drawList(); load(); })];
  list.addEventListener("keydown", (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const all = [...list.querySelectorAll("a")];
    all[Math.min(all.length - 1, Math.max(0, all.indexOf(document.activeElement) + step))]?.focus();
  });
  detail.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !event.target.closest("textarea, input")) location.hash = "#/incidents";
  });

  function drawList() {
    const some = store.listed(filter);
    const open = store.open.length;
    setText(document.getElementById("incidents-summary"), store.incidents.size ? `${open} open, ${store.incidents.size} in all` : "");
    refill(list, JSON.stringify([filter, chosen, some.map((i) => [i.id, i.state, i.updated_at, i.acknowledged_at])]), () => some.length
      ? some.map((i) => incidentRow(i, i.id === chosen))
      : h("li", {}, nothing(filter === "all" ? "No incident" : `No ${filter} incident`, "The diagnosis keeps silent when nothing is wrong.")));
  }

  async function load() {
    const id = chosen;
    root.classList.toggle("has-incident", id !== null);
    if (id === null) {
      const first = store.listed(filter)[0];
      whole = null;
      if (first && matchMedia("(min-width: 901px)").matches) await draw(first.id);
      else refill(detail, "none", () => []);
      return;
    }
    await draw(id);
  }

  async function draw(id) {
    let incident = store.incidents.get(id);
    if (!whole || whole.id !== id || whole.updated_at !== incident?.updated_at || whole.state !== incident?.state) {
      try {
        whole = await get(`incidents/${encodeURIComponent(id)}`);
      } catch (error) {
        if (!incident) {
          refill(detail, `e${id}`, () => nothing("No such incident", error.message));
          return;
        }
        whole = incident;
      }
    }
    incident = whole;
    if (chosen !== null && chosen !== id) return;
    const kept = detail.dataset.id === id ? opened() : null;
    if (refill(detail, JSON.stringify([incident, store.job?.job]), () => page(incident, acknowledged)) && kept) restore(kept);
    detail.dataset.id = id;
  }

  /** What the reader has opened, scrolled to and written; an update of the incident must not take it. */
  function opened() {
    return {
      note: detail.querySelector("textarea")?.value,
      parts: [...detail.querySelectorAll("details")].map((d) => [d.open, d.lastChild.scrollTop]),
    };
  }

  function restore({ note, parts }) {
    const field = detail.querySelector("textarea");
    if (field && note) field.value = note;
    detail.querySelectorAll("details").forEach((d, i) => { if (parts[i]) [d.open, d.lastChild.scrollTop] = parts[i]; });
  }

  function acknowledged(answer) {
    whole = { ...whole, ...answer };
    store.setIncident(whole);
    refill(detail, JSON.stringify([whole, store.job?.job]), () => page(whole, acknowledged));
  }

  drawList();
  return {
    show: (argument) => { chosen = argument; drawList(); load(); if (argument !== null) scrollTo(0, 0); },
    end: () => { offs.forEach((off) => off()); root.classList.remove("has-incident"); },
  };
}

/** One line of a list of incidents; `whole`: with its sentence. */
export function incidentRow(incident, current, whole = false) {
  const v = incident.verdict;
  return h("li", {}, h("a", { class: "incident-row", href: `#/incidents/${encodeURIComponent(incident.id)}`, "aria-current": current ? "true" : null, id: `row-${incident.id}` },
    h("span", { class: "incident-mark" }, shape(incident.state === "open" ? STATUS_OF_KIND[v.kind] ?? 2 : 0)),
    h("span", { class: "incident-main" }, h("b", {}, sentence(v.kind)), h("span", { class: whole ? "said" : "who", title: incident.headline }, whole ? incident.headline : suspectsText(v))),
    h("span", { class: "incident-when" }, h("span", {}, clock(incident.opened_at)), h("span", { class: `tag t-${incident.state}` }, incident.acknowledged_at ? "acknowledged" : incident.state))));
}

function suspectsText(v) {
  if (!v.suspects.length) return "no suspect";
  const names = v.suspects.slice(0, 3).map(name);
  return names.join(", ") + (v.suspects.length > 3 ? ` and ${count(v.suspects.length - 3)} more` : "");
}

const name = (s) => (s.target === "link" ? `link ${s.name.replace(">", " → ")}` : `${s.target} ${s.name}`);

function page(i, acknowledged) {
  const v = i.verdict;
  const facts = [
    ["opened", clock(i.opened_at)],
    i.state === "closed" ? ["closed", clock(i.closed_at)] : ["last seen", clock(i.updated_at)],
    ["found after", seconds(i.latency_s)],
    ["rounds", count(i.rounds)],
    ["step", i.step >= 0 ? count(i.step) : "–"],
    ["policy", i.enforced ? `${i.action}, carried out` : i.action],
  ];
  return h("article", { "aria-labelledby": "incident-title" },
    h("a", { class: "back", href: "#/incidents" }, "← All incidents"),
    h("header", { class: "incident-head" }, h("div", {}, h("p", { class: "mono id" }, i.id), h("h2", { id: "incident-title" }, shape(i.state === "open" ? STATUS_OF_KIND[v.kind] ?? 2 : 0), sentence(v.kind))),
      h("span", { class: `tag t-${i.state}` }, i.state)),
    h("p", { class: "lead" }, i.headline, i.headline.endsWith(".") ? "" : "."),
    cost(i), section("What to do", h("p", {}, sentence(v.action)), commands(i), responseForm(i)),
    h("dl", { class: "strip" }, facts.map(([k, t]) => h("div", {}, h("dt", {}, k), h("dd", {}, t ?? "–")))),
    section("Suspects", v.suspects.length ? h("ul", { class: "suspects" }, v.suspects.map(suspect)) : h("p", { class: "quietly" }, "No suspect.")),
    section("Evidence", h("ol", { class: "evidence" }, v.evidence.map((e) => h("li", {}, sentence(e))))),
    v.rules_out.length ? section("Rules out", h("ul", { class: "plain" }, v.rules_out.map((r) => h("li", {}, sentence(r))))) : null,
    section("Would be refuted by", h("p", {}, sentence(v.refuted_by))),
    Object.keys(v.numbers ?? {}).length ? section("Numbers", h("dl", { class: "numbers" }, Object.entries(v.numbers).map(([k, n]) => h("div", {}, h("dt", {}, k.replaceAll("_", " ")), h("dd", {}, figure(n)))))) : null,
    consequences(i), probes(i.probes), i.said ? section("What the job says", h("pre", { class: "stack", tabindex: "0" }, i.said)) : null, texts("Stacks", i.stacks), texts("Last calls", i.calls), texts("Last output", i.logs), ackForm(i, acknowledged));
}

/** What it has cost so far: from its first sign to when it was last seen, of all ranks of the job. */
function cost(i) {
  if (i.cost === null || i.cost === undefined) return null;
  const lasted = Math.max(0, i.updated_at - (i.opened_at - i.latency_s)), world = store.job?.world ?? 0;
  const lost = (i.cost * lasted * world) / 3600;
  const what = i.cost >= 1 ? `No step for ${seconds(lasted)}` : `${percent(i.cost)} of each step for ${seconds(lasted)}`;
  const so = i.state === "open" ? " so far" : "";
  return section("Cost", h("p", {}, h("b", {}, what), 60 * lost >= 1 ? `: ${lost >= 1 ? plural(Math.round(lost), "rank-hour") : plural(Math.round(60 * lost), "rank-minute")} of ${plural(world, "rank")}${so}.` : `${so}.`));
}

/** Commands to type next: who stands still is looked at; where a controller is, its node is left out. */
function commands(i) {
  const job = store.job?.job ?? "", { ranks } = store;
  const out = [[`ckptd incidents ${quoted(i.id)} --job ${quoted(job)}`, "the same in a terminal, with stacks and last calls"]];
  const first = i.verdict.suspects.find((s) => s.target === "rank");
  const row = first && i.state === "open" ? ranks.rowOf.get(Number(first.name)) : undefined;
  if (row !== undefined && ranks.alive[row] && ranks.pid[row]) out.unshift([`py-spy dump --pid ${ranks.pid[row]}`, `on ${ranks.nodeName(row)}: what rank ${first.name} does now`]);
  if (store.elastic?.controller && i.state === "open" && i.nodes.length) out.push([`ckptd ctl exclude ${i.nodes.map(quoted).join(" ")} --job ${quoted(job)} --reason ${quoted(i.id)}`, "leaves the node out; the others go on from the last committed step"]);
  return h("ul", { class: "commands" }, out.map(([text, says]) => h("li", {}, h("code", {}, text), copier(text), h("span", { class: "quietly" }, says))));
}

/** Names come from the job: what is copied to a shell is one word each. */
const quoted = (text) => (/^[\w.:@%+=/-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`);

function copier(text) {
  if (!navigator.clipboard) return null;
  const button = h("button", { type: "button", class: "quiet small", "aria-label": `Copy ${text}`, onclick: async () => {
    await navigator.clipboard.writeText(text).then(() => setText(button, "Copied"), () => setText(button, "Not copied"));
  } }, "Copy");
  return button;
}

const section = (title, ...children) => h("section", {}, h("h3", {}, title), ...children);

function suspect(s) {
  const bar = h("progress", { max: "1", value: s.confidence, "aria-label": `confidence of ${name(s)}` });
  const link = s.target === "rank" ? h("a", { href: `#/ranks/${s.name}` }, name(s)) : s.target === "link" ? h("a", { href: "#/links" }, name(s)) : h("span", {}, name(s));
  return h("li", {}, h("b", {}, link), bar, h("span", { class: "num" }, percent(s.confidence)), h("span", { class: "detail" }, s.detail));
}

function probes(all) {
  if (!all?.length) return null;
  return section("Probes", table(["From", "To", ">Took"], all.map((p) => [p.src ?? "", p.dst ?? "", p.seconds === null || p.error ? h("span", { class: "bad" }, p.error || "none came back") : seconds(p.seconds)]), "Link probes of this incident"));
}

/** Stacks, calls or output by rank; the first is open. */
function texts(title, all) {
  const some = Object.entries(all ?? {});
  if (!some.length) return null;
  return section(title, some.map(([rank, said], n) => h("details", { open: n === 0 && title === "Stacks" },
    h("summary", {}, `Rank ${rank}`, said.how ? h("span", { class: "quietly" }, ` by ${said.how} in ${seconds(said.taken_s)}`) : null),
    h("pre", { class: "stack", tabindex: "0" }, said.text ?? said))));
}

function consequences(i) {
  return i.consequences?.length ? section("Followed from it", h("ul", { class: "plain" }, i.consequences.map((c) => h("li", {}, sentence(c))))) : null;
}

/** What was done about it, and what a person may have done. */
function responseForm(i) {
  if (!i.response && !i.proposal) return null;
  const said = h("p", { class: "form-error", role: "alert" });
  const button = i.proposal && h("button", { type: "button", class: "danger filled", id: "enforce", onclick: async () => {
    if (!confirm(`${sentence(i.proposal.text)}? The job goes on from its last committed step.`)) return;
    button.disabled = true;
    try {
      await post(`incidents/${encodeURIComponent(i.id)}/enforce`, {});
    } catch (error) {
      button.disabled = false;
      setText(said, `Not done: ${error.message}. ${error.hint}`);
    }
  } }, sentence(i.proposal.text));
  return h("div", {}, i.response ? h("p", {}, sentence(i.response)) : null, button ? h("div", { class: "form-end" }, button, said) : null);
}

function ackForm(i, acknowledged) {
  if (i.acknowledged_at) return section("Acknowledged", h("p", {}, `${clock(i.acknowledged_at)}: ${i.note || "without a note"}`));
  const note = h("textarea", { id: "ack-note", rows: "2", maxlength: "2000", placeholder: "What was done, for the next reader" });
  const said = h("p", { class: "form-error", role: "alert" });
  return section("Acknowledge", h("form", { onsubmit: async (event) => {
    event.preventDefault();
    try {
      acknowledged(await post(`incidents/${encodeURIComponent(i.id)}/ack`, { note: note.value }) ?? {});
    } catch (error) {
      setText(said, `Not acknowledged: ${error.message}. ${error.hint}`);
    }
  } }, h("label", { class: "hidden", for: "ack-note" }, "Note"), note, h("div", { class: "form-end" }, h("button", { type: "submit", class: "primary" }, "Acknowledge"), said)));
}
