// Each view, light and dark, wide and narrow: no violation that axe-core finds, nothing that sticks out.
// Arguments: login URL, rank at fault.

"use strict";

const { axe, drive, VIEWS, sideways } = require("./browser.cjs");

drive(async ({ open, found }) => {
  const rank = process.argv[3];
  Object.assign(found, { violations: [], looked: 0, sideways: {} });
  for (const colorScheme of ["light", "dark"]) {
    for (const width of [1440, 390]) {
      const page = await open("#/overview", { width, height: width > 900 ? 900 : 844, colorScheme });
      for (const view of [...VIEWS, `ranks/${rank}`]) {
        await page.evaluate((v) => { location.hash = `#/${v}`; }, view);
        await page.waitForFunction((v) => document.getElementById("view").className.includes(`view-${v}`), view.split("/")[0]);
        if (view.startsWith("ranks/")) await page.locator(".rank-more table").first().waitFor();
        if (view === "progress") await page.locator(".plots td a").first().waitFor();
        if (view === "incidents" && width > 900) await page.locator(".evidence li").first().waitFor();
        await page.waitForTimeout(300);
        found.looked += 1;
        found.violations.push(...await axe(page, `${view}, ${colorScheme}, ${width}`));
        found.sideways[`${view} ${width}`] = await sideways(page);
      }
    }
  }
});
