// What the scripts share: a browser that may talk to the daemon alone, and what it complained of.

"use strict";

const { createRequire } = require("node:module");
const fs = require("node:fs");
const path = require("node:path");

const { chromium } = createRequire(path.join(process.env.CKPTD_UI, "package.json"))("playwright-core");

/**
 * Run `body({open, found, login})` with a browser; prints `found` as one JSON document. `expected` of
 * `open` are texts of complaints that the script provokes.
 */
async function drive(body) {
  const login = process.argv[2];
  const host = new URL(login).host;
  const found = { problems: [] };
  const browser = await chromium.launch({
    executablePath: process.env.CKPTD_CHROMIUM,
    args: ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"],
  });
  async function open(hash, { width = 1440, height = 900, colorScheme = "light", logIn = true, expected = [] } = {}) {
    const ignoreHTTPSErrors = login.startsWith("https:"); // of an authority that the test made
    const context = await browser.newContext({ viewport: { width, height }, colorScheme, ignoreHTTPSErrors });
    const page = await context.newPage();
    page.setDefaultTimeout(20000);
    page.on("console", (m) => {
      if (["error", "warning"].includes(m.type()) && !expected.some((e) => m.text().includes(e))) found.problems.push(`${hash}: ${m.text()}`);
    });
    page.on("pageerror", (e) => found.problems.push(`${hash}: ${e.stack}`));
    page.on("request", (r) => { if (new URL(r.url()).host !== host) found.problems.push(`${hash}: asks ${r.url()}`); });
    await page.addInitScript(() => {
      // eslint-disable-next-line no-undef
      window.longest = 0;
      new PerformanceObserver((list) => { for (const e of list.getEntries()) window.longest = Math.max(window.longest, e.duration); }).observe({ type: "longtask", buffered: true });
    });
    if (logIn) await page.goto(login);
    await page.goto(new URL("/", login).href + hash);
    return page;
  }
  try {
    await body({ open, found, login });
  } catch (error) {
    found.problems.push(String(error.stack));
  } finally {
    await browser.close();
  }
  process.stdout.write(`${JSON.stringify(found)}\n`);
}

const AXE = fs.readFileSync(path.join(process.env.CKPTD_UI, "node_modules/axe-core/axe.min.js"), "utf8");

/** What axe-core finds on the page as it is, each with `where`. */
async function axe(page, where) {
  if (!await page.evaluate(() => Boolean(window.axe))) await page.evaluate(AXE); // the page's policy lets no script in by an element
  const told = await page.evaluate(() => window.axe.run(document, { resultTypes: ["violations"] }));
  return told.violations.map((v) => `${v.id} in ${where}: ${v.nodes.map((n) => `${n.html.slice(0, 160)} ${n.any[0]?.message ?? ""}`).slice(0, 3).join(" | ")}`);
}

const VIEWS = ["overview", "progress", "ranks", "incidents", "links", "calls", "checkpoints", "elastic"];
const cells = (page, n) => page.waitForFunction((k) => Number(document.querySelector("canvas.map-canvas")?.dataset.cells) === k, n);
const sideways = (page) => page.evaluate(() => document.documentElement.scrollWidth - innerWidth);

module.exports = { axe, drive, VIEWS, cells, sideways };
