// Each view, light and dark, wide and narrow: no violation that axe-core finds, nothing that sticks out.
// Arguments: login URL, rank at fault.

"use strict";

const fs = require("node:fs");
const path = require("node:path");
const { drive, VIEWS, sideways } = require("./browser.cjs");

const AXE = fs.readFileSync(path.join(process.env.CKPTD_UI, "node_modules/axe-core/axe.min.js"), "utf8");

drive(async ({ open, found }) => {
  const rank = process.argv[3];
  Object.assign(found, { violations: [], looked: 0, sideways: {} });
  for (const colorScheme of ["light", "dark"]) {
    for (const width of [1440, 390]) {
      const page = await open("#/overview", { width, height: width > 900 ? 900 : 844, colorScheme });
      await page.evaluate(AXE); // the page's policy lets no script in by an element
      for (const view of [...VIEWS, `ranks/${rank}`]) {
        await page.evaluate((v) => { location.hash = `#/${v}`; }, view);
        await page.waitForFunction((v) => document.getElementById("view").className.includes(`view-${v}`), view.split("/")[0]);
        if (view.startsWith("ranks/")) await page.locator(".rank-more table").first().waitFor();
        if (view === "progress") await page.locator(".plots td a").first().waitFor();
        if (view === "incidents" && width > 900) await page.locator(".evidence li").first().waitFor();
        await page.waitForTimeout(300);
        const told = await page.evaluate(() => window.axe.run(document, { resultTypes: ["violations"] }));
        found.looked += 1;
        for (const v of told.violations) found.violations.push(`${v.id} in ${view}, ${colorScheme}, ${width}: ${v.nodes.map((n) => `${n.html.slice(0, 160)} ${n.any[0]?.message ?? ""}`).slice(0, 3).join(" | ")}`);
        found.sideways[`${view} ${width}`] = await sideways(page);
      }
    }
  }
});
