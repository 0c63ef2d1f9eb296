// The job's controller: where it is, its nodes, what recoveries took, and orders for it.

import { post } from "../api.js";
import { legend, partsBar } from "../charts.js";
import { h, panel, refill, setText, table } from "../dom.js";
import { clock, count, percent, seconds, sentence } from "../format.js";
import { listen, store } from "../store.js";
import { shape } from "../words.js";

/** Parts of a recovery in their order: [word, names in the API]. */
const PARTS = [["detect", ["detect"]], ["fence and plan", ["fence", "plan"]], ["spawn", ["spawn"]], ["import", ["import"]],
  ["init", ["init"]], ["load", ["load"]], ["first step", ["first_step"]], ["failed attempts", ["again"]]];
const KINDS = ["useful", "training", "saving", "lost", "restarting", "waiting", "parked"];
const STATE_OF = { running: 0, done: 0, aborted: 3, parked: 4 };
const LEVELS = ["in process", "respawn", "relaunch", "requeue"];
/** Those that take something from the job, which nobody should give by a slip. */
const DANGEROUS = ["restart", "exclude", "drain", "stop"];
/** Orders: [kind, word, what it asks of nodes, what it does]. */
const ORDERS = [
  ["restart", "Restart", false, "All ranks save, end and start again."],
  ["pause", "Pause", false, "The ranks save and end; nodes wait until the job is resumed."],
  ["resume", "Resume", false, "The ranks start again."],
  ["exclude", "Exclude", true, "These nodes are left out until they are added again; the others restart."],
  ["drain", "Drain", true, "The ranks save first; then these nodes are left out."],
  ["add", "Add", true, "These nodes are taken in again."],
  ["stop", "Stop", false, "The ranks save and the job ends. It does not come back by itself."],
];

/** What a recovery took, in seconds. */
export const total = (r) => PARTS.reduce((a, p) => a + took(r, p), 0);
const took = (r, [, names]) => names.reduce((a, n) => a + (r[n] ?? 0), 0);

/** Put the controller's panels into `root`; returns what ends them. */
export function controller(root) {
  const facts = h("div", {}), state = h("p", { class: "big state", id: "elastic-state" }), why = h("p", { class: "tile-under", id: "elastic-why" });
  const orders = orderBar();
  const nodes = h("div", {}), recoveries = h("div", {}), spent = h("div", {}), told = h("div", {});
  const all = h("div", { hidden: true, id: "controller" },
    panel("Controller", {}, h("div", { class: "goodput" }, h("div", {}, state, why), facts), orders.node),
    panel("Nodes", {}, nodes), panel("Recoveries", {}, recoveries), panel("Time of the job", {}, spent), panel("Said by the controller", {}, told));
  root.append(all);
  const off = listen(["elastic"], draw);

  function draw() {
    const { controller: link, status } = store.elastic ?? {};
    all.hidden = !link;
    if (!link) return;
    orders.draw(link.connected, status);
    if (!status) {
      setText(state, "Not reached");
      setText(why, "The daemon knows of a controller that has not answered yet.");
      return;
    }
    refill(state, `${status.state}${link.connected}`, () => [shape(link.connected ? STATE_OF[status.state] ?? 1 : 4), h("span", {}, link.connected ? sentence(status.state) : `Not reached; it was: ${status.state}`)]);
    setText(why, `since ${clock(status.since)}${status.reason ? `: ${status.reason}` : ""}`);
    refill(facts, JSON.stringify([status.generation, status.step, status.shape, status.world, status.planned, status.log, status.address]), () => [strip(status)]);
    refill(nodes, JSON.stringify(status.nodes.map((n) => [n.name, n.up, n.slots, n.sick, n.running, n.spare, n.faults, out(n)])), () => [nodeTable(status)]);
    refill(recoveries, JSON.stringify(status.recoveries), () => recoveryTable(status.recoveries));
    refill(spent, JSON.stringify(status.goodput), () => goodput(status.goodput));
    refill(told, JSON.stringify(status.told), () => [status.told.length
      ? h("ul", { class: "plain" }, status.told.slice().reverse().map((t) => h("li", {}, sentence(t)))) : h("p", { class: "quietly" }, "Nothing yet.")]);
  }

  draw();
  return { end: off };
}

const layout = (s) => (s ? `pp ${s.pp} · dp ${s.dp} · tp ${s.tp}` : "–");

function strip(s) {
  const facts = [["generation", count(s.generation)], ["committed step", count(s.step)], ["layout", layout(s.shape)], ["ranks", count(s.world)],
    ["made for", layout(s.planned)], ["controller", s.address || "–"], ["membership log", s.log || "–"]];
  return h("dl", { class: "strip" }, facts.map(([k, v]) => h("div", {}, h("dt", {}, k), h("dd", {}, v))));
}

// -- nodes ------------------------------------------------------------------------------------------

const out = (n) => (n.out_until_s === null ? "until it is added" : n.out_until_s > 0 ? `${Math.ceil(n.out_until_s / 60)} min` : "");

function nodeState(n) {
  if (!n.up) return [3, "gone"];
  if (out(n)) return [4, `left out, ${out(n)}`];
  if (n.spare) return [1, "spare"];
  return [0, n.running ? "running" : "member"];
}

function slots(n) {
  if (!n.sick?.length) return count(n.slots);
  return h("span", {}, count(n.slots), h("span", { class: "bad" }, ` (${n.sick.length} out of use)`), n.sick.map((text) => h("div", { class: "quietly" }, sentence(text))));
}

function nodeTable(status) {
  const rows = status.nodes.map((n) => {
    const [mark, text] = nodeState(n);
    return [h("b", {}, n.name), h("span", { class: "node-state" }, shape(mark), text), slots(n), n.running ? count(n.running) : "–", n.faults ? h("span", { class: "bad" }, count(n.faults)) : "0"];
  });
  return table(["Node", "State", ">Slots", ">Runs generation", ">Faults"], rows, "Nodes that the controller knows");
}

// -- recoveries -------------------------------------------------------------------------------------

function recoveryTable(some) {
  if (!some.length) return [h("p", { class: "quietly" }, "None yet.")];
  const most = Math.max(1e-9, ...some.map(total));
  const rows = some.slice().reverse().map((r) => [
    clock(r.at), h("span", {}, sentence(r.cause), r.planned ? h("span", { class: "quietly" }, " (planned)") : null), `L${r.level} ${LEVELS[r.level] ?? ""}`, count(r.steps_lost), seconds(total(r)),
    partsBar(PARTS.map((p, i) => [p[0], took(r, p), i]), { most, label: PARTS.map((p) => `${p[0]} ${seconds(took(r, p))}`).join(", "), words: (p, v) => [r.cause, `${p}: ${seconds(v)}`] }),
  ]);
  return [legend(PARTS.map(([word]) => word)), table(["When", "Cause", "Level", ">Steps lost", ">Took", "Split"], rows, "Recoveries, the newest first")];
}

function goodput(kinds) {
  const parts = KINDS.map((k, i) => [k, Math.max(0, kinds[k] ?? 0), i]);
  const total = parts.reduce((a, [, v]) => a + v, 0);
  if (!total) return [h("p", { class: "quietly" }, "Not known yet.")];
  return [partsBar(parts, { most: total, width: 900, label: parts.map(([k, v]) => `${k} ${percent(v / total, 1)}`).join(", "), words: (k, v) => [k, seconds(v), percent(v / total, 1)] }),
    h("ul", { class: "legend" }, parts.map(([k, v], i) => h("li", {}, legend(KINDS).children[i].firstChild, k, h("b", {}, `${seconds(v)}, ${percent(v / total, 1)}`))))];
}

// -- orders -----------------------------------------------------------------------------------------

/** Buttons, and the form that asks once more before anything is done. */
function orderBar() {
  const form = h("div", { class: "order-form", role: "group", "aria-label": "Confirm the order", hidden: true });
  const said = h("p", { class: "quietly", role: "status", id: "order-said" });
  const buttons = ORDERS.map((o) => h("button", { type: "button", class: DANGEROUS.includes(o[0]) ? "small danger" : "small", "data-order": o[0], disabled: true, onclick: () => ask(o) }, o[1]));
  let names = [];

  function ask([kind, text, ofNodes, does]) {
    setText(said, "");
    const chosen = names.map((name) => h("input", { type: "checkbox", value: name, onchange: () => name_() }));
    const submit = h("button", { type: "submit", class: DANGEROUS.includes(kind) ? "danger filled" : "primary" }, text);
    /** The last button says what it does, and to whom. */
    const name_ = () => {
      const nodes = chosen.filter((c) => c.checked).map((c) => c.value);
      const whom = ofNodes ? nodes.join(", ") || "…" : `job ${store.job?.job ?? ""}`;
      setText(submit, `${text} ${whom}`);
    };
    const reason = h("input", { type: "text", id: "order-reason", maxlength: "500", autocomplete: "off" });
    const error = h("p", { class: "form-error", role: "alert" });
    const done = () => { form.hidden = true; form.replaceChildren(); };
    form.replaceChildren(h("form", { onsubmit: async (event) => {
      event.preventDefault();
      const nodes = ofNodes ? chosen.filter((c) => c.checked).map((c) => c.value) : [];
      if (ofNodes && !nodes.length) { setText(error, "Choose a node."); return; }
      try {
        await post("elastic/orders", { kind, nodes, reason: reason.value });
        done();
        setText(said, `The controller has taken it in: ${[kind, ...nodes].join(" ")}.`);
      } catch (problem) {
        setText(error, `Not done: ${problem.message}. ${problem.hint}`);
      }
    } }, h("p", {}, h("b", {}, `${text}? `), does),
    ofNodes ? h("fieldset", {}, h("legend", {}, "Nodes"), names.map((name, i) => h("label", {}, chosen[i], name))) : null,
    h("label", { for: "order-reason" }, "Reason, for the membership log"), reason,
    h("div", { class: "form-end" }, submit, h("button", { type: "button", class: "quiet", onclick: done }, "Cancel"), error)));
    name_();
    form.hidden = false;
    reason.focus();
  }

  function draw(connected, status) {
    names = (status?.nodes ?? []).map((n) => n.name);
    const live = connected && status && !status.ended;
    for (const b of buttons) {
      const kind = b.dataset.order;
      const fits = kind === "resume" ? status?.state === "parked" : kind === "pause" ? status?.state !== "parked" : true;
      b.disabled = !(live && fits);
    }
    for (const b of form.querySelectorAll("button[type=submit]")) b.disabled = !live;
  }

  return { node: h("div", { class: "orders" }, h("div", { class: "order-buttons", role: "group", "aria-label": "Orders" }, buttons), form, said), draw };
}
