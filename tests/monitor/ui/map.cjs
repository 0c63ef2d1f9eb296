// The map of ranks: first paint, updates, keyboard. Arguments: login URL, number of ranks.

"use strict";

const { drive, cells } = require("./browser.cjs");

drive(async ({ open, found }) => {
  const ranks = Number(process.argv[3]);
  const page = await open("#/ranks");
  await cells(page, ranks);
  found.drawn_ms = await page.evaluate(() => performance.now());
  found.first_paint_ms = await page.evaluate(() => performance.getEntriesByName("first-contentful-paint")[0]?.startTime ?? null);
  // Updates: the time of each drawing, as the canvas tells it, and the longest task of the page.
  await page.evaluate(() => { window.longest = 0; });
  found.draw_ms = [];
  for (let i = 0; i < 4; i += 1) {
    const before = await page.evaluate(() => document.querySelector("canvas.map-canvas").dataset.drawn);
    await page.waitForFunction((n) => document.querySelector("canvas.map-canvas").dataset.drawn !== n, before);
    found.draw_ms.push(Number(await page.evaluate(() => document.querySelector("canvas.map-canvas").dataset.ms)));
  }
  found.longest_task_ms = await page.evaluate(() => window.longest);

  // Keyboard alone: into the map, to a rank, its panel, out again.
  await page.locator(".map").focus();
  await page.keyboard.press("Home");
  found.home = await page.locator(".map [role=status]").textContent();
  await page.keyboard.press("ArrowDown");
  found.down = await page.locator(".map [role=status]").textContent();
  await page.keyboard.press("Enter");
  await page.locator(".rank-panel").waitFor();
  found.panel = await page.locator("#rank-title").textContent();
  await page.locator(".rank-more table").first().waitFor();
  found.address = new URL(page.url()).hash;
  await page.keyboard.press("ArrowRight");
  found.followed = await page.locator("#rank-title").textContent();
  await page.keyboard.press("Escape");
  await page.locator(".rank-panel").waitFor({ state: "hidden" });
  found.focused = await page.evaluate(() => document.activeElement.className);
  for (const measure of ["age", "score", "self"]) await page.locator(`[data-value=${measure}]`).click();
  await page.locator("[data-value=node]").click();
  found.arranged = Number(await page.evaluate(() => document.querySelector("canvas.map-canvas").dataset.cells));
});
