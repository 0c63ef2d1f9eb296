// A job with a controller: its state and nodes, an order that asks first, and what it leads to.
// Arguments: login URL.

"use strict";

const { drive, sideways } = require("./browser.cjs");

drive(async ({ open, found }) => {
  const page = await open("#/elastic");
  const text = async (selector) => (await page.locator(selector).allTextContents()).map((t) => t.trim());
  const state = (word) => page.waitForFunction((w) => document.getElementById("elastic-state")?.textContent === w, word);
  await state("Running");
  found.nodes = await text("#controller tbody b");
  found.disabled = await page.locator("[data-order][disabled]").evaluateAll((all) => all.map((b) => b.dataset.order));
  await page.locator("[data-order=exclude]").click();
  await page.locator(".order-form button[type=submit]").click();
  found.error = (await text(".order-form .form-error"))[0];
  await page.locator(".order-form button", { hasText: "Cancel" }).click();
  await page.locator("[data-order=restart]").click();
  await page.locator("#order-reason").fill("seen <b>by a test</b>");
  await page.locator(".order-form button[type=submit]").click();
  await page.locator("#order-said", { hasText: "taken it in" }).waitFor();
  await page.locator("#controller td", { hasText: "seen <b>by a test</b>" }).waitFor();
  await state("Running");
  found.recoveries = await page.locator("#controller tbody svg.parts").count();

  found.wide = await sideways(page);

  const narrow = await open("#/elastic", { width: 360, height: 740, colorScheme: "dark" });
  await narrow.locator("#controller tbody b").first().waitFor();
  await narrow.locator("[data-order=exclude]").click();
  found.sideways = await sideways(narrow);
});
