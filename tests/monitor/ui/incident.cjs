// A fault is there: from the overview to the evidence, acknowledged, on wide and narrow screens.
// Arguments: login URL, rank at fault.

"use strict";

const { drive, VIEWS, cells, sideways } = require("./browser.cjs");

drive(async ({ open, found }) => {
  const rank = process.argv[3];
  const page = await open("#/overview");
  const row = page.locator(".o-incidents .incident-row").first();
  found.row = await row.locator(".said").textContent();
  await row.click();
  await page.locator(".incident-detail .evidence li").first().waitFor();
  const text = async (selector) => (await page.locator(selector).allTextContents()).map((t) => t.trim());
  found.title = (await text("#incident-title"))[0];
  found.lead = (await text(".incident-detail .lead"))[0];
  found.cost = (await text(".incident-detail section")).find((t) => t.startsWith("Cost")).slice(4);
  found.commands = await text(".commands code");
  found.pid = await page.evaluate(async () => { const { store } = await import("./js/store.js"); return store.ranks.pid[store.ranks.rowOf.get(5)]; });
  found.headings = await text(".incident-detail h3");
  found.evidence = await text(".evidence li");
  found.suspects = await text(".suspects li b");
  found.document_title = await page.title();
  await page.locator("#ack-note").fill("seen <b>by a test</b>");
  await page.locator(".incident-detail button[type=submit]").click();
  await page.locator("text=Acknowledged").first().waitFor();
  found.acknowledged = (await text(".incident-detail section")).filter((t) => t.startsWith("Acknowledged"))[0];
  await page.locator(".suspects a").first().click();
  await page.locator(".rank-panel").waitFor();
  found.panel = await page.locator("#rank-title").textContent();
  found.facts = await text(".rank-panel dt, .rank-panel dd");
  found.odd = await text(".odd-list b");
  found.taken = (await text(".rank-panel h3")).find((t) => t.startsWith("Stack"));
  await page.locator("#look").click();
  found.asked = await page.locator(".rank-panel [role=status] span").textContent();
  await page.locator(".rank-panel [role=status] span", { hasText: "taken at" }).waitFor();
  // Digits go through the views; the theme switch goes round.
  for (const [i, view] of VIEWS.entries()) {
    await page.keyboard.press(String(i + 1));
    await page.waitForFunction((v) => document.getElementById("view").className.includes(`view-${v}`), view);
  }
  await page.locator("#theme").click();
  await page.locator("#theme").click();
  found.theme = await page.evaluate(() => document.documentElement.dataset.theme);

  const narrow = await open("#/overview", { width: 360, height: 740, colorScheme: "dark" });
  await cells(narrow, 16);
  found.sideways = {};
  for (const view of [...VIEWS, `ranks/${rank}`]) {
    await narrow.evaluate((v) => { location.hash = `#/${v}`; }, view);
    await narrow.waitForFunction((v) => document.getElementById("view").className.includes(`view-${v.split("/")[0]}`), view);
    await narrow.waitForTimeout(150);
    found.sideways[view] = await sideways(narrow);
  }
  await narrow.locator(".rank-panel").waitFor();
});
