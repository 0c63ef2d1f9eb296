// Without a token; then the daemon goes away and comes back. Arguments: login URL. Standard output
// says GONE when the daemon is to be stopped, and BACK when it is to be started again; the other
// side answers each with a line.

"use strict";

const readline = require("node:readline");
const { axe, drive, cells, sideways } = require("./browser.cjs");

const lines = readline.createInterface({ input: process.stdin })[Symbol.asyncIterator]();
const ask = async (what) => {
  process.stdout.write(`${what}\n`);
  await lines.next();
};

drive(async ({ open, found, login }) => {
  const expected = ["401", "503", "ERR_CONNECTION_REFUSED", "ERR_CONNECTION_RESET", "ERR_EMPTY_RESPONSE", "ERR_INCOMPLETE_CHUNKED_ENCODING"];
  const page = await open("", { logIn: false, expected });
  await page.locator("#login").waitFor();
  await page.locator("#token").fill("wrong");
  await page.keyboard.press("Enter");
  await page.locator(".form-error:not(:empty)").waitFor();
  found.refused = await page.locator(".login .form-error").textContent();
  const enter = async () => {
    await page.locator("#token").fill(new URL(login).searchParams.get("token"));
    await page.keyboard.press("Enter");
    await page.locator("#login").waitFor({ state: "detached" });
  };
  await enter();
  await cells(page, 16);
  await page.waitForFunction(() => document.getElementById("connection").textContent === "live");
  await ask("GONE");
  await page.locator("#banner").waitFor({ state: "visible" });
  found.lost = await page.locator("#banner").textContent();
  await page.waitForFunction(() => document.title.startsWith("Lost"));
  found.pill = await page.locator(".pill").textContent();
  found.state = await page.locator(".tile").first().textContent();
  found.violations = [];
  found.sideways = [];
  for (const view of ["ranks/3", "progress", "elastic", "overview"]) {
    await page.evaluate((v) => { location.hash = `#/${v}`; }, view);
    for (const [colorScheme, width] of [["light", 1440], ["dark", 390]]) {
      await page.emulateMedia({ colorScheme });
      await page.setViewportSize({ width, height: 844 });
      await page.waitForTimeout(300);
      found.violations.push(...await axe(page, `${view}, ${colorScheme}, ${width}, lost`));
      found.sideways.push(await sideways(page));
    }
  }
  await page.setViewportSize({ width: 1440, height: 900 });
  await ask("BACK");
  await page.locator("#login").waitFor({ timeout: 40000 }); // the session ended with the daemon
  await enter();
  await page.locator("#banner").waitFor({ state: "hidden", timeout: 40000 });
  await cells(page, 16);
  await page.waitForFunction(() => !document.title.startsWith("Lost"));
  found.again = await page.locator(".tile .tile-value").first().textContent();
  found.back = await page.locator("#connection").textContent();
});
