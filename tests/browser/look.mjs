// node look.mjs MODULES PAGE SCRIPT [PICTURE] [OPTIONS]: open a page in a headless browser, and print as JSON what the
// script, the body of an async function, returns there; and take a picture, or print it if that is called *.pdf.
//
// MODULES is the folder where npm put what package.json beside this file names; PAGE a file or an address. OPTIONS, as
// JSON: width, height, dark, and allow, an expression for addresses that the page may ask. Exits with 1, saying what is
// wrong, for any other request and for any error on the page.

import { createRequire } from "node:module";
import { resolve } from "node:path";
import { pathToFileURL } from "node:url";

const [modules, path, script, picture = "", options = "{}"] = process.argv.slice(2);
const { width = 1400, height = 860, dark = false, allow = "^(file|data|blob):" } = JSON.parse(options);
const require = createRequire(resolve(modules, "package.json"));
const load = async name => (await import(pathToFileURL(require.resolve(name)).href)).default;
const [puppeteer, chromium] = [await load("puppeteer-core"), await load("@sparticuz/chromium")];

const browser = await puppeteer.launch({
  executablePath: await chromium.executablePath(), args: [...chromium.args, "--no-sandbox"], headless: "shell",
});
const faults = [];
try {
  const page = await browser.newPage();
  page.on("request", request => { if (!new RegExp(allow).test(request.url())) faults.push(`asks for ${request.url()}`); });
  page.on("pageerror", error => faults.push(error.stack ?? error.message));
  page.on("console", message => { if (message.type() === "error") faults.push(message.text()); });
  await page.emulateMediaFeatures([{ name: "prefers-color-scheme", value: dark ? "dark" : "light" }]);
  await page.setViewport({ width, height });
  await page.goto(/^[a-z]+:\/\//.test(path) ? path : pathToFileURL(resolve(path)).href);
  // A script of its own may press keys and move the mouse of this page: it gets them as `press` and `mouse`.
  await page.exposeFunction("press", key => page.keyboard.press(key));
  await page.exposeFunction("mouse", (what, ...where) => page.mouse[what](...where));
  const answer = await page.evaluate(`(async () => { ${script} })()`);
  await page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))");
  if (picture.endsWith(".pdf")) await page.pdf({ path: picture, preferCSSPageSize: true, printBackground: true });
  else if (picture) await page.screenshot({ path: picture });
  console.log(JSON.stringify(answer ?? null));
} finally {
  await browser.close();
}
if (faults.length) {
  console.error(faults.join("\n"));
  process.exit(1);
}
