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
  await page.locator(".order-form label", { hasText: "n1" }).locator("input").check();
  found.submit = (await text(".order-form button[type=submit]"))[0];
  const colour = (selector) => page.locator(selector).first().evaluate((e) => getComputedStyle(e).color);
  found.looks = (await colour("[data-order=stop]")) !== (await colour("[data-order=add]"));
  await page.locator(".order-form button", { hasText: "Cancel" }).click();
  await page.locator("[data-order=restart]").click();
  await page.locator("#order-reason").fill("seen <b>by a test</b>");
  await page.locator(".order-form button[type=submit]").click();
  await page.locator("#order-said", { hasText: "taken it in" }).waitFor();
  await page.locator("#controller td", { hasText: "seen <b>by a test</b>" }).waitFor();
  await state("Running");
  found.recoveries = await page.locator("#controller tbody svg.parts").count();

  found.wide = await sideways(page);

  const front = await open("#/overview");
  await front.locator(".o-recoveries li").first().waitFor();
  found.recovered = await front.locator(".o-recoveries li").count();
  found.tiles = (await front.locator(".tiles h2").allTextContents());
  found.last = (await front.locator(".tiles .tile-under").first().textContent());
  // What is said where no rank reports is one paragraph, and not columns.
  found.empty = await front.locator(".statuses li.empty p").evaluate((e) => [getComputedStyle(e.parentElement).display, e.children.length]);
  found.emptyWide = await front.locator(".statuses li.empty").evaluate((e) => e.getBoundingClientRect().width / e.closest(".panel").getBoundingClientRect().width);

  const nowhere = await open("#/no-such-view");
  found.unknown = await nowhere.locator("h1").textContent();
  // How much of a card's width ranks of several meshes and nodes take, at most 640 pixels high.
  found.filled = await nowhere.evaluate(async () => {
    const { byMesh, byNode } = await import("./js/layout.js");
    const out = {};
    for (const [pp, dp, tp] of [[8, 16, 8], [4, 32, 8], [1, 1024, 1], [16, 64, 1], [2, 4, 2]]) {
      const coords = [], rank = [], node = [];
      for (let i = 0; i < pp * dp * tp; i += 1) {
        coords.push([Math.floor(i / (dp * tp)), Math.floor(i / tp) % dp, i % tp]);
        rank.push(i);
        node.push(Math.floor(i / 8));
      }
      const nodes = Array.from({ length: Math.ceil(rank.length / 8) }, (_, k) => `n${k}`);
      const ranks = { length: rank.length, rank, node, nodes, mesh: { axes: ["pp", "dp", "tp"], coords } };
      const wide = (place) => {
        const cells = new Set(Array.from(place.x, (x, i) => `${x} ${place.y[i]}`));
        return [cells.size === rank.length, (Math.max(...place.x) + place.size) / 1000, place.height];
      };
      out[`${pp} ${dp} ${tp}`] = [wide(byMesh(ranks, 1000)), wide(byNode(ranks, 1000))];
    }
    return out;
  });

  const narrow = await open("#/elastic", { width: 360, height: 740, colorScheme: "dark" });
  await narrow.locator("#controller tbody b").first().waitFor();
  await narrow.locator("[data-order=exclude]").click();
  found.sideways = await sideways(narrow);
});
