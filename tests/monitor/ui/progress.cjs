// The job over time: charts, zoom by keys, and another run beside it. Arguments: login URL.

"use strict";

const { drive } = require("./browser.cjs");

drive(async ({ open, found }) => {
  const page = await open("#/progress");
  const text = async (selector) => (await page.locator(selector).allTextContents()).map((t) => t.trim());
  const drawn = page.locator(".plot-panel:visible canvas");
  await drawn.first().waitFor();
  await page.locator(".plots td a").first().waitFor();
  found.charts = await page.locator(".plot-panel:visible h2").allTextContents();
  found.value = await page.locator(".plot-names b").first().textContent();
  found.happened = await text(".plots td a");
  const box = page.locator(".plot").first();
  await box.focus();
  found.label = await box.getAttribute("aria-label");
  const shown = () => new URL(page.url()).hash;
  await page.keyboard.press("ArrowLeft");
  await page.waitForFunction(() => /^#\/progress\/\d+-\d+$/.test(location.hash));
  const ends = (hash) => hash.match(/\d+/g).map(Number);
  // Further back nothing was recorded: the chart stays, and with it the focus.
  for (let i = 0; i < 6; i += 1) await page.keyboard.press("ArrowLeft");
  await page.locator(".plot-panel p:visible").first().waitFor();
  found.focused = await page.evaluate(() => document.activeElement.className);
  await page.keyboard.press("ArrowRight");
  const [from, to] = ends(shown());
  await page.keyboard.press("ArrowUp");
  await page.waitForFunction((h) => location.hash !== h, `#/progress/${from}-${to}`);
  const [nearer, sooner] = ends(shown());
  found.zoomed = nearer >= from && sooner <= to && sooner - nearer < to - from;
  await page.keyboard.press("Escape");
  await page.waitForFunction(() => location.hash === "#/progress");
  await page.locator(".plot-panel p:visible").first().waitFor({ state: "hidden" });
  // A drag over a chart shows that part of it.
  const over = await page.locator(".u-over").first().boundingBox();
  await page.mouse.move(over.x + over.width * 0.1, over.y + 20);
  await page.mouse.down();
  await page.mouse.move(over.x + over.width * 0.5, over.y + 20, { steps: 4 });
  await page.mouse.up();
  await page.waitForFunction(() => /^#\/progress\/\d+-\d+$/.test(location.hash));
  found.dragged = true;
  await page.locator("button[aria-label='Follow the newest']").click();

  // A chart whose place was gone for a moment, as when a page is printed, is there again.
  await page.evaluate(() => { document.querySelector(".plots").style.display = "none"; });
  await page.waitForTimeout(200);
  await page.evaluate(() => { document.querySelector(".plots").style.display = ""; });
  await drawn.first().waitFor({ timeout: 3000 });

  await page.waitForFunction(() => document.querySelectorAll("#beside option").length > 1);
  found.runs = await text("#beside option");
  await page.locator("#beside").selectOption({ index: 1 });
  await page.locator("section[aria-label='Two runs'] table").waitFor();
  found.two = await text("section[aria-label='Two runs'] tbody b");
  found.usual = await text("section[aria-label='Two runs'] tbody td:last-child");
  await page.locator(".plots:not([hidden]) canvas").first().waitFor();
  found.compared = await page.locator(".plot-panel:visible h2").allTextContents();

  found.functions = await page.evaluate(async () => {
    const { rising, numbersOf } = await import("./js/views/progress.js");
    const { losses, split } = await import("./js/views/runs.js");
    const { known } = await import("./js/plot.js");
    const save = (at, generation, numbers) => ({ begun_at: at, generation, numbers, outcome: "durable", stalls_s: {} });
    const at = [0, 10, 20, 30, 40, 50, 60, 900, 910, 1000];
    const step = [5, 50, 100, 0, 100, 110, 120, 130, 140, 1];
    const none = at.map(() => null);
    return {
      rising: [
        rising([[0, 100], [10, 110], [20, 0], [22, 1], [30, 120]]).map(([, v]) => v),
        rising([[0, 100], [10, 0], [20, 1], [90, 2], [100, 3]]).map(([, v]) => v),
        rising([[0, 1], [10, null], [20, 2]]).map(([, v]) => v),
      ],
      numbers: numbersOf([save(0, 0, { loss: 4, tokens: 100 }), save(10, 0, { loss: 3, tokens: 300 }), save(20, 1, { loss: 3.5, tokens: 200 }), save(30, 1, { loss: 2, tokens: 500 })]),
      losses: ["j", "other"].map((job) => losses([{ job: "j", from: 100, to: 200 }, { job, from: 0, to: 50 }], [
        { ...save(150, 2, { "val_loss": 2, lr: 1 }), step: 7 }, { ...save(10, 1, { "val_loss": 4 }), step: 5 }, { ...save(20, 1, { lr: 1 }), step: 6 }], "j")),
      runs: split("j", { at, step_max: step, step_s_median: none, self_max: none }).map((r) => r.step),
      gap: known([0, 1, 2, 60, 61], [[1, 1, null, 2, 2]])[1][0],
    };
  });
});
