// The chart: a row per stream, as SVG that is made anew whenever something changes. Only what can be seen is in it, and
// it looks as all drawings do: the classes are theirs.

const NEAR = 3;  // a limit of memory is drawn as a line if it is at most so many times what is held
const GAP = 10, HOST = 22, AXIS = 26, CLOSE = 0.4, THIN = 4, NARROW = 36;
const EM = 0.58, FONT = 12, LABEL = 10.5;  // the width of a letter is estimated, as in all drawings

let printing = false;
const width = (words, size) => [...words].reduce((sum, letter) => sum + (letter > "\u2e7f" ? 2 : 1), 0) * EM * size;
function shorten(words, room, size = LABEL) {
  if (width(words, size) <= room) return words;
  const letters = [...words];
  while (letters.length > 3 && width(`${letters.join("")}…`, size) > room) letters.pop();
  return letters.length > 3 ? `${letters.join("")}…` : "";
}

// ---- elements

const ESCAPED = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" };
const n = value => Math.round(value * 100) / 100;
const rect = (look, x, y, wide, high, mark = "") =>
  `<rect class="${look}" x="${n(x)}" y="${n(y)}" width="${n(wide)}" height="${n(high)}"${mark && ` data-mark="${mark}"`}/>`;
const text = (look, x, y, words) =>
  `<text class="${look}" x="${n(x)}" y="${n(y)}">${words.replace(/[&<>"]/g, letter => ESCAPED[letter])}</text>`;
const path = (look, d, mark = "") => `<path class="${look}" d="${d}"${mark && ` data-mark="${mark}"`}/>`;

// ---- places

const gantt = document.getElementById("gantt");
const view = { start: 0, end: makespan * 1.02, top: 0, gutter: 150, wide: 1000, high: 400, full: 0, redrawMs: 0, boxes: 0 };
const x = ns => view.gutter + ((ns - view.start) / (view.end - view.start)) * (view.wide - view.gutter - 14);
const when = at => view.start + ((at - view.gutter) / (view.wide - view.gutter - 14)) * (view.end - view.start);

// Rows from top to bottom: streams, and the bytes of their device after them.
const rows = [];
data.streams.forEach(([name], row) => {
  const last = row + 1 === data.streams.length || data.streams[row + 1][0] !== name;
  const host = data.hosts[row] !== (data.hosts[row - 1] ?? "") ? data.hosts[row] : "";
  rows.push({ stream: row, device: name, first: row === 0 || data.streams[row - 1][0] !== name, host });
  if (last && data.memory[name]) rows.push({ memory: data.memory[name], device: name });
});
const ofStream = new Map(rows.filter(row => !row.memory).map(row => [row.stream, row]));
const columns = [0, 1].map(at => Math.min(Math.max(...data.streams.map(names => width(names[at], FONT)), 0), 110) + 12);
// As high as there is room for, within reason.
function arrange() {
  const devices = new Set(rows.map(row => row.device)).size, both = state.mode === "both";
  const hosts = rows.filter(row => row.host).length;
  const room = ((printing ? 600 : view.high) - AXIS - 22 - devices * GAP - hosts * HOST) / rows.length;
  const pitch = Math.floor(Math.min(Math.max(room, both ? 34 : 20), both ? 56 : 40));
  let y = AXIS + 14;
  rows.forEach((row, i) => {
    if (i && row.device !== rows[i - 1].device) y += GAP;
    if (row.host) y += HOST;
    row.y = y;
    row.high = pitch - 6;
    y += pitch;
  });
  view.full = y + 6;
  view.gutter = Math.min(24 + columns[0] + columns[1] + 46, view.wide * 0.4);
}

// Where the boxes of each shown timeline lie in a row: both at once means predicted above measured.
function lanes(row) {
  if (state.mode !== "both") return [{ times: times[state.mode], y: row.y, high: row.high, hollow: false }];
  const half = Math.round(row.high * 0.36);
  return [
    { times: times.predicted, y: row.y, high: half, hollow: true },
    { times: times.measured, y: row.y + half + 2, high: row.high - half - 2, hollow: false },
  ];
}

function zoom(factor, at = (view.start + view.end) / 2) {
  const least = 20, span = Math.min(Math.max((view.end - view.start) * factor, least), makespan * 1.5);
  const share = (at - view.start) / (view.end - view.start);
  show(at - share * span, at - share * span + span);
}
function show(start, end) {
  const span = end - start, room = span * 0.5;
  view.start = Math.min(Math.max(start, -room), makespan + room - span * 0.1);
  view.end = view.start + span;
  redraw();
}
const fit = () => { view.top = 0; show(0, makespan * 1.02); };
const pan = (share, down = 0) => {
  view.top = Math.max(0, Math.min(view.top + down, view.full - view.high));
  const by = (view.end - view.start) * share;
  show(view.start + by, view.end + by);
};

// Bring items into view, zooming only if they would be too small or too large to see.
function reveal(items, closely = false) {
  const t = items.some(item => shown().ran(item)) ? shown() : times[names[0]];
  const there = items.filter(item => t.ran(item));
  if (!there.length) return;
  const start = there.reduce((least, item) => Math.min(least, t.start[item]), Infinity);
  const end = there.reduce((most, item) => Math.max(most, t.end(item)), -Infinity);
  const span = view.end - view.start;
  const row = ofStream.get(data.on[there[0]][0]);
  if (row.y + row.high > view.top + view.high || row.y < view.top + AXIS) {
    view.top = Math.max(0, Math.min(row.y - view.high / 2, view.full - view.high));
  }
  const tiny = (end - start) / span < 0.004, huge = end - start > span;
  if (closely || tiny || huge) {
    const wide = Math.max((end - start) * (closely ? 2 : tiny ? 30 : 1.4), makespan / 1000);
    show((start + end - wide) / 2, (start + end + wide) / 2);
  } else if (start < view.start || end > view.end) {
    show((start + end - span) / 2, (start + end + span) / 2);
  } else redraw();
}

function ticks() {
  const least = ((view.end - view.start) * NS) / Math.max((view.wide - view.gutter) / 110, 2);
  const power = 10 ** Math.floor(Math.log10(least)), to = view.end * NS, [scale, unit] = unitOf(to, TIMES);
  const step = [1, 2, 5, 10].map(digit => digit * power).find(s => s >= least * 0.999);
  const found = [];
  for (let i = Math.max(0, Math.ceil((view.start * NS) / step)); i * step <= to; i++) {
    const at = x((i * step) / NS), words = i ? `${Number(((i * step) / scale).toPrecision(9))} ${unit}` : "0";
    if (at >= view.gutter - 1) found.push([at, words]);
  }
  return found;
}

// ---- drawing

let asked = false;
function redraw() {
  if (asked) return;
  asked = true;
  requestAnimationFrame(() => { asked = false; draw(); });
}

function draw() {
  const began = performance.now(), { width: wide, height: high } = gantt.getBoundingClientRect();
  Object.assign(view, { wide, high, boxes: 0 });
  arrange();
  const seen = rows.filter(row => row.y + row.high > view.top && row.y < view.top + high);
  const left = view.gutter - 3, right = wide - view.gutter - 8, top = view.top + AXIS;
  const inner = seen.map(row => (row.memory ? memory(row) : boxes(row))).join("") + arrows();
  gantt.innerHTML = `<g transform="translate(0 ${-view.top})">${seen.map(track).join("")}${grid()}</g>
    <svg x="${left}" y="${AXIS}" width="${right}" height="${high}" viewBox="${left} ${top} ${right} ${high}">${inner}</svg>
    ${axis()}${view.full > high ? scrolled() : ""}`;
  view.redrawMs = performance.now() - began;
}

function track(row) {
  const middle = row.y + row.high / 2 + 4, name = row.memory ? "memory" : data.streams[row.stream][1];
  let made = text("muted", 18 + columns[0], middle, shorten(name, columns[1] - 4, FONT));
  if (row.host) made += text("muted strong", 18, row.y - 7, row.host) + path("grid", `M18 ${row.y - HOST}H${view.wide - 14}`);
  if (row.first) made += text("ink strong", 18, middle, shorten(row.device, columns[0] - 4, FONT));
  if (row.memory) return made;
  const t = shown(), share = t.makespan ? t.busy[row.stream] / t.makespan : 0;
  made += text("muted end", view.gutter - 8, middle, `${Math.round(share * 100)}%`);
  return made + rect("track", view.gutter, row.y, view.wide - view.gutter - 14, row.high);
}
const grid = () => ticks().map(([at]) => path("grid", `M${Math.round(at) + 0.5} 0V${view.full - 10}`)).join("");

function axis() {
  const labels = ticks().map(([at, words]) => (at < view.wide - 12 ? text("muted middle label", at, AXIS / 2 + 6, words) : ""));
  const made = rect("paper", 0, 0, view.wide, AXIS) + text("muted end label", view.gutter - 8, AXIS / 2 + 6, "busy") + labels.join("");
  // A bracket over the last period of a loop.
  const t = shown(), from = x(t.makespan - t.period), to = x(t.makespan);
  if (!t.period || !several || to < view.gutter) return made;
  const begin = from > view.gutter ? `M${from} ${AXIS + 7}V${AXIS + 1}` : `M${view.gutter} ${AXIS + 1}`;
  const name = from - 45 > view.gutter ? text("ink end label", from - 5, AXIS + 8, "period") : "";
  return made + path("period", `${begin}H${to}V${AXIS + 7}`) + name;
}

// How much of the rows is in view, at the right edge.
function scrolled() {
  const room = view.high - AXIS - 4, long = (view.high / view.full) * room;
  return rect("muted held", view.wide - 8, AXIS + (view.top / (view.full - view.high)) * (room - long), 4, long);
}

// Where many boxes are narrower than a pixel, those that touch and look alike become one.
function boxes(row) {
  const found = [], labels = [], hits = new Set(state.hits), fades = state.chosen.length > 0 || hits.size > 0;
  const markOf = item => (state.chosen.length ? state.related.get(item) : hits.has(item) && "found") || "";
  for (const lane of lanes(row)) {
    const { times: t, y, high } = lane;
    let last = null;
    for (const item of t.rows[row.stream]) {
      if (t.end(item) < view.start) continue;
      const left = x(t.start[item]), wide = x(t.end(item)) - left;
      if (left > view.wide) break;
      view.boxes++;
      const mark = markOf(item), hollow = lane.hollow || free.has(item), odd = runOf(item) % 2, pale = fades && !mark;
      const look = [kind(item), odd && "odd", hollow && "hollow", pale && "pale", t.critical.has(item) && "critical",
        wide < THIN && "thin"].filter(Boolean).join(" ");
      const right = left + wide, joins = last && wide < 1.5 && !mark && last.look === look && left - last.right < CLOSE;
      if (joins) last.right = right;
      else found.push(last = { look, left, y, right, high, mark });
      if (wide > NARROW && high > 11) labels.push(labelOf(item, left, wide, y + high / 2 + 4, pale, hollow || odd));
    }
  }
  found.sort((a, b) => a.mark.length - b.mark.length || a.look.includes("critical") - b.look.includes("critical"));
  const made = found.map(box => rect(box.look, box.left, box.y, Math.max(box.right - box.left, CLOSE), box.high, box.mark));
  return made.join("") + labels.join("");
}

function labelOf(item, left, wide, y, pale, isInk) {
  const from = Math.max(left, view.gutter), room = Math.min(left + wide, view.wide) - from - 8, full = data.name[item];
  const words = shorten(width(full, LABEL) <= room ? full : brief(item), room);
  const ink = isInk || pale ? "ink" : isCopy(item) ? "on-copy" : "on-task";
  return words && text(`${ink} middle label${pale ? " pale" : ""}`, from + (room + 8) / 2, y, words);
}

function memory(row) {
  const starts = row.memory.start, held = row.memory.nbytes, most = Math.max(...held, 1);
  const limit = Object.hasOwn(data.limits, row.device) ? data.limits[row.device] : undefined;
  const near = limit !== undefined && limit <= NEAR * most, high = near ? Math.max(most, limit) * 1.05 : most;
  const y = bytes => n(row.y + row.high - (bytes / high) * row.high);
  const steps = held.map((bytes, i) => `V${y(bytes)}H${n(x(starts[i + 1] ?? makespan))}`).join("");
  const line = near ? path("limit", `M${view.gutter} ${y(limit)}H${view.wide}`) : "";
  const share = limit === undefined ? "" : ` of ${bytes(limit)}`;
  return path("muted held", `M${n(x(starts[0]))} ${y(0)}${steps}V${y(0)}`) + line
    + text("muted label", view.gutter + 5, row.y + row.high - 3, `at most ${bytes(most)}${share}`);
}

// Waits: all of them where they are few, else those of what is selected.
function arrows() {
  const t = shown(), item = one();
  if (item >= 0) {
    const into = [item, ...through(item, predecessors).filter(isCopy)], from = [item, ...through(item, successors).filter(isCopy)];
    const links = into.flatMap(to => predecessors(to).map(other => [other, to, "predecessor"]));
    links.push(...from.flatMap(other => successors(other).map(to => [other, to, "successor"])));
    return links.map(([a, b, mark]) => arrow(t, a, b, after[b].includes(a) ? "line order" : "line", mark)).join("");
  }
  if (state.chosen.length || state.hits.length || view.boxes >= 250) return "";
  const opacity = Math.min(Math.max(60 / (t.arrows.length || 1), 0.25), 0.6);
  return `<g opacity="${opacity}">${t.arrows.map(([a, b]) => arrow(t, a, b, "line wait")).join("")}</g>`;
}

function arrow(t, a, b, look, mark = "") {
  if (!t.ran(a) || !t.ran(b)) return "";
  const x1 = n(x(t.end(a))), x2 = n(x(t.start[b]));
  if (Math.max(x1, x2) < 0 || Math.min(x1, x2) > view.wide) return "";
  const places = item => data.on[item].map(row => lanes(ofStream.get(row)).find(lane => lane.times === t));
  const pairs = places(a).flatMap(p => places(b).map(q => [p, q]));
  const [from, to] = pairs.reduce((best, pair) => (Math.abs(pair[0].y - pair[1].y) < Math.abs(best[0].y - best[1].y) ? pair : best));
  const down = Math.sign(to.y - from.y), y1 = from.y + (down > 0 ? from.high : 0), y2 = to.y + (down < 0 ? to.high : 0);
  const bend = down === 0 ? -14 : down * Math.max(Math.abs(y2 - y1) / 2, 8);
  return path(look, `M${x1} ${y1}C${x1} ${y1 + bend} ${x2} ${y2 + (down === 0 ? bend : -bend)} ${x2} ${y2}`, mark);
}

// The item under a point of the chart, or near it if it is small; -1 if there is none.
function under(px, py) {
  const y = py + view.top;
  const row = rows.find(row => !row.memory && y >= row.y && y < row.y + row.high);
  if (!row || px < view.gutter) return -1;
  const lane = lanes(row).reduce((best, lane) => (y >= lane.y ? lane : best));
  const off = item => Math.max(lane.times.start[item] - when(px), when(px) - lane.times.end(item), 0);
  const near = lane.times.rows[row.stream].filter(item => off(item) <= when(3) - when(0));
  return near.reduce((best, item) => (best < 0 || off(item) < off(best) ? item : best), -1);
}
