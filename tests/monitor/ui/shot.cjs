// A picture of one view while an incident is open. Arguments: login URL, view, path of the picture.

"use strict";

const { drive } = require("./browser.cjs");

drive(async ({ open, found }) => {
  const [view, path] = process.argv.slice(3);
  const page = await open(`#/${view}`, { width: 1280, height: 720 });
  await page.locator("canvas.map-canvas").waitFor();
  await page.waitForFunction(() => document.title.startsWith("("));
  await page.waitForTimeout(1500); // figures of two more rounds
  await page.screenshot({ path });
  found.path = path;
});
