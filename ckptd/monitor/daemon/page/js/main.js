// The page's frame: views by the address's hash, the bar, the connection's state, the theme, the login.

import { onRefused, post } from "./api.js";
import { h, refill, setText } from "./dom.js";
import { count, clock, plural, seconds } from "./format.js";
import { connect, hold, release } from "./live.js";
import { listen, store } from "./store.js";
import { LOST, icon, shape, stateOf } from "./words.js";
import { overview } from "./views/overview.js";
import { progress } from "./views/progress.js";
import { ranks } from "./views/ranks.js";
import { incidents } from "./views/incidents.js";
import { links } from "./views/links.js";
import { calls } from "./views/calls.js";
import { checkpoints } from "./views/checkpoints.js";
import { elastic } from "./views/elastic.js";

const VIEWS = [
  ["overview", "Overview", overview], ["progress", "Progress", progress], ["ranks", "Ranks", ranks], ["incidents", "Incidents", incidents],
  ["links", "Links", links], ["calls", "Calls", calls], ["checkpoints", "Saves", checkpoints],
  ["elastic", "Elastic", elastic],
];
const $ = (id) => document.getElementById(id);

// -- views ------------------------------------------------------------------------------------------

let shown = null; // {name, end, show}

function route() {
  const [name, ...rest] = location.hash.replace(/^#\/?/, "").split("/");
  const [key, , make] = VIEWS.find(([k]) => k === name) ?? (name ? [`unknown ${name}`, "", unknown] : VIEWS[0]);
  const argument = rest.length ? decodeURIComponent(rest.join("/")) : null;
  if (shown?.name !== key) {
    shown?.end();
    $("tip").hidden = true;
    $("view").replaceChildren();
    $("view").className = `view-${key.split(" ")[0]}`;
    shown = { name: key, ...make($("view")) };
    scrollTo(0, 0);
  }
  shown.show?.(argument);
  for (const a of document.querySelectorAll("#nav a")) {
    if (a.dataset.view === key) a.setAttribute("aria-current", "page");
    else a.removeAttribute("aria-current");
  }
  drawTitle();
}

/** An address that is none of this page's, from an old link or a slip of the hand. */
function unknown(root) {
  root.append(h("h1", {}, "Unknown page"),
    h("p", { id: "unknown" }, h("code", {}, location.hash), " is not a view of this page. Go to ", h("a", { href: "#/overview" }, "Overview"), "."));
  return { end: () => {} };
}

function drawTitle() {
  const [, title] = VIEWS.find(([k]) => k === shown?.name) ?? ["", "No such page"];
  const open = store.open.length;
  const lost = store.connection.state === "lost" ? "Lost · " : open ? `(${open}) ` : "";
  document.title = `${lost}${title} · ${store.job?.job || "ckptd"}`;
}

function fillNav() {
  $("nav").append(...VIEWS.map(([key, title]) => h("li", {},
    h("a", { href: `#/${key}`, "data-view": key }, icon(key), h("span", {}, title),
      key === "incidents" ? h("b", { class: "badge", id: "badge", hidden: true }) : null))));
}

// -- bar --------------------------------------------------------------------------------------------

function drawBar() {
  const job = store.job;
  const open = store.open.length;
  $("badge").hidden = !open;
  setText($("badge"), String(open));
  if (!job) return;
  const state = stateOf(job);
  const word = state === LOST ? state.word : job.state === "incident" && open ? plural(open, "open incident") : state.word;
  refill($("jobline"), JSON.stringify([job.job, job.state, word]), () => [
    h("span", { class: "jobname", title: job.job }, job.job || "no job yet"),
    h("a", { class: `pill p-${state === LOST ? "lost" : job.state}`, href: "#/incidents" }, shape(state.status), h("span", {}, word)),
    h("span", { class: "fact", id: "bar-step" }), h("span", { class: "fact", id: "bar-ranks" }),
  ]);
  const step = job.step ?? {};
  const spread = step.min !== step.max && step.min !== null ? `${count(step.min)} to ${count(step.max)}` : count(step.max);
  setText($("bar-step"), step.max === null || step.max === undefined || step.max < 0 ? "step –" : `step ${spread}`);
  setText($("bar-ranks"), `${count(job.ranks_reporting)} of ${plural(job.world, "rank")}`);
}

function drawConnection() {
  const { state, since } = store.connection;
  const text = { live: "live", connecting: "connecting", lost: "connection lost", locked: "locked" }[state];
  refill($("connection"), state, () => [h("i", { class: `dot d-${state}`, "aria-hidden": "true" }), h("span", {}, text)]);
  document.body.classList.toggle("stale", state === "lost");
  const banner = $("banner");
  banner.hidden = state !== "lost";
  if (state === "lost") {
    const at = clock(since / 1000);
    refill(banner, at, () => [
      h("span", {}, h("strong", {}, `Connection lost since ${at}`), " (", h("span", { id: "lost-for" }), "). "),
      h("span", { class: "wide-only" }, "What is shown is as it was then. Trying again. "),
      h("button", { type: "button", class: "small", onclick: connect }, "Try now"),
    ]);
    setText($("lost-for"), seconds(Math.floor((Date.now() - since) / 1000)));
  }
}

// -- theme ------------------------------------------------------------------------------------------

const THEMES = { auto: ["light", "as the system"], light: ["dark", "light"], dark: ["auto", "dark"] };

function drawTheme() {
  const now = document.documentElement.dataset.theme ?? "auto";
  const [next, word] = THEMES[now];
  const button = $("theme");
  button.setAttribute("aria-label", `Colours: ${word}. Change to ${THEMES[next][1]}`);
  button.title = `Colours: ${word}`;
  setText(button, { auto: "◐", light: "○", dark: "●" }[now]);
  button.onclick = () => {
    if (next === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = next;
    try { localStorage.setItem("ckptd-theme", next); } catch { /* storage is closed: until the page is left */ }
    drawTheme();
    dispatchEvent(new Event("themechange"));
  };
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => dispatchEvent(new Event("themechange")));

// -- login ------------------------------------------------------------------------------------------

function askToken(message = "") {
  hold();
  store.setConnection("locked");
  if ($("login")) return;
  const field = h("input", { id: "token", name: "token", type: "password", autocomplete: "current-password", required: true, spellcheck: "false" });
  const said = h("p", { class: "form-error", role: "alert" }, message);
  const form = h("form", { onsubmit: async (event) => {
    event.preventDefault();
    try {
      await post("login", { token: field.value.trim() });
      $("login").remove();
      release();
      route();
    } catch (error) {
      setText(said, error.status === 0 ? "The daemon does not answer." : "This is not the daemon's token.");
      field.select();
    }
  } }, h("label", { for: "token" }, "Token"), field, said, h("button", { type: "submit", class: "primary" }, "Open"));
  document.body.append(h("div", { id: "login", class: "login", role: "dialog", "aria-modal": "true", "aria-labelledby": "login-title" },
    h("div", { class: "login-box" }, h("img", { src: "icon.svg", alt: "", width: 28, height: 28 }),
      h("h1", { id: "login-title" }, "This daemon wants a token"),
      h("p", {}, h("code", {}, "ckptd serve"), " printed an address with the token when it started. Open that, or paste the token here."), form)));
  field.focus();
}

/** Take the token out of the address at once: addresses end up in histories and screenshots. */
async function tokenOfAddress() {
  const query = new URLSearchParams(location.search);
  const token = query.get("token");
  if (token === null) return;
  history.replaceState(null, "", location.pathname + location.hash);
  await post("login", { token }).catch(() => {});
}

// -- keys -------------------------------------------------------------------------------------------

addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || $("login")) return;
  if (event.target.closest("input, textarea, select")) return;
  const view = VIEWS[Number(event.key) - 1];
  if (view) location.hash = `#/${view[0]}`;
});

// -- start ------------------------------------------------------------------------------------------

fillNav();
drawTheme();
drawConnection();
addEventListener("hashchange", () => { route(); $("view").focus({ preventScroll: true }); });
listen(["job", "incidents", "connection"], drawBar);
listen(["connection"], drawConnection);
listen(["job", "incidents", "connection"], drawTitle);
setInterval(() => { if (store.connection.state === "lost") drawConnection(); }, 1000);
onRefused(askToken);
route();
tokenOfAddress().then(connect);
