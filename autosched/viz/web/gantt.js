// The chart: a row per stream, one canvas, redrawn whenever something changes. Only what can be seen is drawn.

const NEAR = 3;  // a limit of memory is drawn as a line if it is at most so many times what is held
const GAP = 10, HOST = 22, AXIS = 26, CLOSE = 0.4, NARROW = 36;
const FONT = "12px system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif";
const SMALL = FONT.replace("12px", "10.5px");

let printing = false;
const palette = {};
let hatch = null;
function readPalette() {
  const style = getComputedStyle(document.documentElement);
  for (const name of ["paper", "ink", "muted", "track", "grid", "task", "backward", "optimizer", "ground", "stripe",
    "on-task", "predecessor", "successor", "found"]) palette[name] = style.getPropertyValue(`--${name}`).trim();
  const tile = document.createElement("canvas");
  tile.width = tile.height = 8;
  const ink = tile.getContext("2d");
  ink.fillStyle = palette.ground;
  ink.fillRect(0, 0, 8, 8);
  ink.strokeStyle = palette.stripe;
  ink.lineWidth = 2.6;
  ink.beginPath();
  for (const x of [-8, 0, 8]) { ink.moveTo(x - 1, 9); ink.lineTo(x + 9, -1); }
  ink.stroke();
  hatch = ink.createPattern(tile, "repeat");
}
// On paper copies are plain: viewers of documents lose patterns.
const fill = name => (name !== "copy" ? palette[name] : printing ? palette.ground : hatch);

// Cut a text to a width, measured once per text and font.
const widths = new Map();
function width(ink, words) {
  const key = ink.font + words;
  if (!widths.has(key)) widths.set(key, ink.measureText(words).width);
  return widths.get(key);
}
function shorten(ink, words, room) {
  const full = width(ink, words);
  if (full <= room) return words;
  const letters = [...words], cut = kept => `${letters.slice(0, kept).join("")}…`;
  let kept = Math.floor(letters.length * (room - 8) / full);
  while (kept >= 3 && width(ink, cut(kept)) > room) kept--;  // its first letters may be wide ones
  return kept < 3 ? "" : cut(kept);
}

function sized(canvas) {
  const box = canvas.getBoundingClientRect(), ratio = printing ? 3 : window.devicePixelRatio || 1;
  const wide = Math.round(box.width * ratio), high = Math.round(box.height * ratio);
  if (canvas.width !== wide || canvas.height !== high) { canvas.width = wide; canvas.height = high; }
  const ink = canvas.getContext("2d");
  ink.setTransform(ratio, 0, 0, ratio, 0, 0);
  ink.clearRect(0, 0, box.width, box.height);
  return [ink, box.width, box.height];
}

const gantt = document.getElementById("gantt");
const view = { start: 0, end: makespan * 1.02, top: 0, gutter: 150, wide: 1000, high: 400, full: 0, redrawMs: 0, boxes: 0 };
const x = clicks => view.gutter + ((clicks - view.start) / (view.end - view.start)) * (view.wide - view.gutter - 14);
const clicks = at => view.start + ((at - view.gutter) / (view.wide - view.gutter - 14)) * (view.end - view.start);

// Rows from top to bottom: streams, and the bytes of their device after them.
const rows = [];
data.streams.forEach(([name], row) => {
  const last = row + 1 === data.streams.length || data.streams[row + 1][0] !== name;
  const host = data.hosts[row] !== (data.hosts[row - 1] ?? "") ? data.hosts[row] : "";
  rows.push({ stream: row, device: name, first: row === 0 || data.streams[row - 1][0] !== name, host });
  if (last && data.memory[name]) rows.push({ memory: data.memory[name], device: name });
});
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
}
const ofStream = new Map(rows.filter(row => !row.memory).map(row => [row.stream, row]));

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

function ticks(from, to, most) {
  const least = ((to - from) * data.click) / most, power = 10 ** Math.floor(Math.log10(least));
  const step = [1, 2, 5, 10].map(digit => digit * power).find(s => s >= least * 0.999);
  const [scale, unit] = [[1, "s"], [1e-3, "ms"], [1e-6, "us"]].find(([s]) => to * data.click >= s) ?? [1e-9, "ns"];
  const found = [];
  for (let i = Math.max(0, Math.ceil((from * data.click) / step)); i * step <= to * data.click; i++) {
    found.push([(i * step) / data.click, i ? `${Number(((i * step) / scale).toPrecision(9))} ${unit}` : "0"]);
  }
  return found;
}

let asked = false;
function redraw() {
  if (asked) return;
  asked = true;
  requestAnimationFrame(() => { asked = false; draw(); });
}

function draw() {
  const began = performance.now();
  const [ink, wide, high] = sized(gantt);
  Object.assign(view, { wide, high });
  arrange();
  ink.font = FONT;
  view.gutter = Math.min(24 + gutter(ink).reduce((sum, w) => sum + w + 12, 0), wide * 0.4);
  view.boxes = 0;
  ink.save();
  ink.translate(0, -view.top);
  const seen = rows.filter(row => row.y + row.high > view.top && row.y < view.top + high);
  drawTracks(ink, seen);
  ink.beginPath();
  ink.rect(view.gutter - 3, view.top + AXIS, wide - view.gutter - 8, high);
  ink.clip();
  drawBoxes(ink, seen);
  drawArrows(ink);
  ink.restore();
  drawAxis(ink);
  if (view.full > high) drawScroll(ink);
  view.redrawMs = performance.now() - began;
}

// How much of the rows is in view, at the right edge.
function drawScroll(ink) {
  const room = view.high - AXIS - 4, long = (view.high / view.full) * room;
  ink.fillStyle = palette.muted;
  ink.globalAlpha = 0.5;
  ink.fillRect(view.wide - 8, AXIS + (view.top / (view.full - view.high)) * (room - long), 4, long);
  ink.globalAlpha = 1;
}

// The widths of the columns before the rows: devices, streams, how busy.
let columnsOfGutter = null;
function gutter(ink) {
  if (!columnsOfGutter) {
    const widest = words => Math.min(Math.max(...words.map(word => ink.measureText(word).width), 0), 110);
    columnsOfGutter = [widest(data.streams.map(([name]) => name)), widest(data.streams.map(s => s[1])), 34];
  }
  return columnsOfGutter;
}

function drawTracks(ink, seen) {
  const [first, second] = gutter(ink);
  ink.textBaseline = "middle";
  for (const row of seen) {
    const middle = row.y + row.high / 2 + 0.5;
    if (row.host) {
      ink.font = `600 ${FONT}`;
      ink.fillStyle = palette.muted;
      ink.fillText(row.host, 18, row.y - 11);
      ink.fillStyle = palette.grid;
      ink.fillRect(18, row.y - HOST, view.wide - 32, 1);
      ink.font = FONT;
    }
    if (row.first) {
      ink.font = `600 ${FONT}`;
      ink.fillStyle = palette.ink;
      ink.fillText(shorten(ink, row.device, first + 8), 18, middle);
      ink.font = FONT;
    }
    ink.fillStyle = palette.muted;
    const name = row.memory ? "memory" : data.streams[row.stream][1];
    ink.fillText(shorten(ink, name, second + 8), 18 + first + 12, middle);
    if (!row.memory) {
      const t = shown(), share = t.makespan ? t.busy[row.stream] / t.makespan : 0;
      ink.textAlign = "right";
      ink.fillText(`${Math.round(share * 100)}%`, view.gutter - 8, middle);
      ink.textAlign = "left";
      ink.fillStyle = palette.track;
      ink.fillRect(view.gutter, row.y, view.wide - view.gutter - 14, row.high);
    }
  }
  ink.strokeStyle = palette.grid;
  ink.beginPath();
  for (const [at] of ticks(view.start, view.end, Math.max((view.wide - view.gutter) / 110, 2))) {
    const across = Math.round(x(at)) + 0.5;
    if (across >= view.gutter) { ink.moveTo(across, 0); ink.lineTo(across, view.full - 10); }
  }
  ink.stroke();
}

function drawAxis(ink) {
  ink.fillStyle = palette.paper;
  ink.fillRect(0, 0, view.wide, AXIS);
  ink.font = SMALL;
  ink.fillStyle = palette.muted;
  ink.fillText("busy", view.gutter - 8 - width(ink, "busy"), AXIS / 2 + 2);
  ink.textAlign = "center";
  for (const [at, words] of ticks(view.start, view.end, Math.max((view.wide - view.gutter) / 110, 2))) {
    if (x(at) >= view.gutter - 1 && x(at) < view.wide - 12) ink.fillText(words, x(at), AXIS / 2 + 2);
  }
  ink.textAlign = "left";
  drawPeriod(ink);
}

// A bracket over the last period of a loop.
function drawPeriod(ink) {
  const t = shown(), from = x(t.makespan - t.period), to = x(t.makespan);
  if (!t.period || !several || to < view.gutter) return;
  ink.strokeStyle = ink.fillStyle = palette.ink;
  ink.lineWidth = 1.2;
  ink.beginPath();
  ink.moveTo(Math.max(from, view.gutter), AXIS + 7);
  if (from > view.gutter) ink.lineTo(from, AXIS + 1);
  ink.lineTo(to, AXIS + 1);
  ink.lineTo(to, AXIS + 7);
  ink.stroke();
  const left = from - 5 - width(ink, "period");
  if (left > view.gutter) ink.fillText("period", left, AXIS + 4);
}

// Boxes are drawn style by style. Where many are narrower than a pixel, those that touch become one.
function drawBoxes(ink, seen) {
  const styles = new Map(), labels = [], outlined = [], marked = [];
  const hits = new Set(state.hits), faded = state.chosen.length > 0 || hits.size > 0;
  const inMark = item => (state.chosen.length ? state.related.has(item) : hits.has(item));
  for (const row of seen) {
    if (row.memory) { drawMemory(ink, row); continue; }
    for (const lane of lanes(row)) {
      const { times: t, y, high } = lane, items = t.rows[row.stream];
      let last = null;
      for (let at = t.first(row.stream, view.start); at < items.length; at++) {
        const item = items[at], left = x(t.start[item]);
        if (left > view.wide) break;
        view.boxes++;
        const right = x(t.end(item)), important = faded && inMark(item), pale = faded && !important;
        const hollow = lane.hollow || free.has(item), narrow = right - left < 1.5;
        const critical = t.critical.has(item), odd = runOf(item) % 2;
        const name = `${kind(item)}${hollow}${pale}${odd}`;
        if (!styles.has(name)) styles.set(name, { kind: kind(item), hollow, pale, odd, boxes: [] });
        const touches = last !== null && narrow && last.narrow && left - last.right < CLOSE;
        if (touches && last.name === name && !important) {
          last.box[2] = Math.max(right - last.box[0], CLOSE);
          last.right = right;
        } else {
          const box = [left, y, Math.max(right - left - (right - left > 3 ? 1 : 0), 1), high];
          styles.get(name).boxes.push(box);
          last = { name, narrow, box, right };
          if (important) marked.push([item, ...box]);
        }
        if (critical) outlined.push([left, y, Math.max(right - left, CLOSE), high, pale]);
        if (right - left > NARROW && high > 11) labels.push([item, last.box, pale, hollow]);
      }
    }
  }
  for (const style of styles.values()) drawStyle(ink, style);
  drawOutlines(ink, outlined, marked);
  drawLabels(ink, labels);
}

function drawStyle(ink, { kind, hollow, pale, odd, boxes }) {
  ink.globalAlpha = (pale ? 0.3 : 1) * (hollow ? 0.45 : 1) * (odd ? 0.4 : 1);
  ink.fillStyle = fill(kind);
  for (const box of boxes) ink.fillRect(...box);
  if (!hollow) return;
  ink.globalAlpha = pale ? 0.3 : 1;
  ink.strokeStyle = palette[kind] ?? palette.stripe;
  ink.lineWidth = 1;
  for (const box of boxes) ink.strokeRect(...box);
}

// The critical path; where boxes are narrow, as a line above and one below, or there would be nothing but outlines.
function drawOutlines(ink, outlined, marked) {
  ink.strokeStyle = ink.fillStyle = palette.ink;
  ink.lineWidth = 2;
  for (const [left, y, wide, high, pale] of outlined) {
    ink.globalAlpha = pale ? 0.35 : 1;
    if (wide > 5) ink.strokeRect(left + 1, y + 1, wide - 3, high - 2);
    else for (const edge of [y - 1, y + high - 1]) ink.fillRect(left, edge, wide, 2);
  }
  ink.globalAlpha = 1;
  for (const [item, left, y, wide, high] of marked) {
    const how = state.chosen.length ? state.related.get(item) : "found";
    ink.strokeStyle = how === "chosen" ? palette.ink : palette[how];
    ink.lineWidth = how === "chosen" && one() >= 0 ? 3 : 1.6;
    ink.strokeRect(left - 1, y - 1, wide + 2, high + 2);
  }
}

function drawLabels(ink, labels) {
  ink.font = SMALL;
  ink.textBaseline = "middle";
  for (const [item, [left, y, wide, high], pale, hollow] of labels) {
    const from = Math.max(left, view.gutter), room = Math.min(left + wide, view.wide) - from - 8;
    const full = data.name[item], words = shorten(ink, width(ink, full) <= room ? full : brief(item), room);
    if (!words) continue;
    const at = from + (room + 8 - width(ink, words)) / 2;
    ink.globalAlpha = pale ? 0.5 : 1;
    const odd = runOf(item) % 2;
    if (isCopy(item) && !hollow && !pale && !odd) {
      ink.strokeStyle = palette.ground;
      ink.lineWidth = 3;
      ink.lineJoin = "round";
      ink.strokeText(words, at, y + high / 2 + 0.5);
      ink.fillStyle = "#1f2328";
    } else ink.fillStyle = hollow || pale || odd ? palette.ink : palette["on-task"];
    ink.fillText(words, at, y + high / 2 + 0.5);
  }
  ink.globalAlpha = 1;
}

function drawMemory(ink, row) {
  const starts = row.memory.start, held = row.memory.nbytes, most = Math.max(...held, 1);
  const limit = Object.hasOwn(data.limits, row.device) ? data.limits[row.device] : undefined;
  const near = limit !== undefined && limit <= NEAR * most, high = near ? Math.max(most, limit) * 1.05 : most;
  const y = n => row.y + row.high - (n / high) * row.high;
  ink.beginPath();
  ink.moveTo(x(starts[0]), y(0));
  held.forEach((n, i) => { ink.lineTo(x(starts[i]), y(n)); ink.lineTo(x(starts[i + 1] ?? makespan), y(n)); });
  ink.lineTo(x(makespan), y(0));
  ink.fillStyle = palette.muted;
  ink.globalAlpha = 0.3;
  ink.fill();
  ink.globalAlpha = 1;
  ink.font = SMALL;
  if (near) {
    ink.strokeStyle = palette.predecessor;
    ink.lineWidth = 1.6;
    ink.setLineDash([9, 3, 2, 3]);
    ink.beginPath();
    ink.moveTo(view.gutter, y(limit));
    ink.lineTo(view.wide, y(limit));
    ink.stroke();
    ink.setLineDash([]);
  }
  const share = limit === undefined ? "" : ` of ${bytes(limit)}`;
  ink.fillText(`at most ${bytes(most)}${share}`, view.gutter + 5, row.y + row.high - 7);
}

// Waits: all of them where they are few, else those of what is selected.
function drawArrows(ink) {
  const t = shown(), item = one();
  if (item >= 0) {
    for (const to of [item, ...through(item, predecessors).filter(isCopy)]) {
      for (const from of predecessors(to)) arrow(ink, t, from, to, palette.predecessor, 1.8, after[to].includes(from));
    }
    for (const from of [item, ...through(item, successors).filter(isCopy)]) {
      for (const to of successors(from)) arrow(ink, t, from, to, palette.successor, 1.8, after[to].includes(from));
    }
  } else if (!state.chosen.length && !state.hits.length && view.boxes < 250) {
    ink.globalAlpha = Math.min(Math.max(60 / (t.arrows.length || 1), 0.25), 0.6);
    for (const [a, b] of t.arrows) arrow(ink, t, a, b, palette.muted, 1, false);
    ink.globalAlpha = 1;
  }
}

function arrow(ink, t, a, b, color, thick, dashed) {
  if (!t.ran(a) || !t.ran(b)) return;
  const x1 = x(t.end(a)), x2 = x(t.start[b]);
  if (Math.max(x1, x2) < 0 || Math.min(x1, x2) > view.wide) return;
  const boxes = item => data.on[item].map(row => lanes(ofStream.get(row)).find(lane => lane.times === t));
  let [one, two] = [boxes(a)[0], boxes(b)[0]];
  for (const p of boxes(a)) for (const q of boxes(b)) if (Math.abs(p.y - q.y) < Math.abs(one.y - two.y)) [one, two] = [p, q];
  const down = Math.sign(two.y - one.y), flat = down === 0;
  const y1 = flat ? one.y : one.y + (down > 0 ? one.high : 0), y2 = flat ? two.y : two.y + (down > 0 ? 0 : two.high);
  const bend = flat ? -14 : down * Math.max(Math.abs(y2 - y1) / 2, 8), back = flat ? -14 : -bend;
  ink.strokeStyle = ink.fillStyle = color;
  ink.lineWidth = thick;
  ink.setLineDash(dashed ? [5, 4] : []);
  ink.beginPath();
  ink.moveTo(x1, y1);
  ink.bezierCurveTo(x1, y1 + bend, x2, y2 + back, x2, y2);
  ink.stroke();
  ink.setLineDash([]);
  const tip = (flat ? 1 : down) * (3 + thick * 1.6);
  ink.beginPath();
  ink.moveTo(x2, y2);
  ink.lineTo(x2 - 2 - thick, y2 - tip);
  ink.lineTo(x2 + 2 + thick, y2 - tip);
  ink.fill();
}

// The item under a point of the canvas, or near it if it is small; -1 if there is none.
function under(px, py) {
  const y = py + view.top;
  const row = rows.find(row => !row.memory && y >= row.y && y < row.y + row.high);
  if (!row || px < view.gutter) return -1;
  const lane = lanes(row).reduce((best, lane) => (y >= lane.y ? lane : best));
  const items = lane.times.rows[row.stream], near = clicks(px + 3) - clicks(px);
  const at = lane.times.first(row.stream, clicks(px) - near), found = [];
  for (let i = at; i < items.length && lane.times.start[items[i]] <= clicks(px) + near; i++) found.push(items[i]);
  const off = item => Math.max(lane.times.start[item] - clicks(px), clicks(px) - lane.times.end(item), 0);
  return found.reduce((best, item) => (best < 0 || off(item) < off(best) ? item : best), -1);
}
