// What the scripts share: a browser that may talk to the daemon alone, and what it complained of.

"use strict";

const { createRequire } = require("node:module");
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
    const context = await browser.newContext({ viewport: { width, height }, colorScheme });
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

const VIEWS = ["overview", "progress", "ranks", "incidents", "links", "calls", "checkpoints", "elastic"];
const cells = (page, n) => page.waitForFunction((k) => Number(document.querySelector("canvas.map-canvas")?.dataset.cells) === k, n);
const sideways = (page) => page.evaluate(() => document.documentElement.scrollWidth - innerWidth);

module.exports = { drive, VIEWS, cells, sideways };
