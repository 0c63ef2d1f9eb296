// The page over TLS: it logs in by its link, is live, and what the browser keeps. Arguments: login URL.

"use strict";

const { drive, cells } = require("./browser.cjs");

drive(async ({ open, found }) => {
  const page = await open("");
  await cells(page, 16);
  await page.waitForFunction(() => document.getElementById("connection").textContent === "live");
  found.cookies = await page.context().cookies();
  found.trusted = await page.evaluate(() => window.isSecureContext && location.protocol);
});
