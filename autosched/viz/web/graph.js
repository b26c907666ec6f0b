// The graph beside the chart. Few tasks are drawn one by one, many as scopes that can be opened, or as what is around
// the selection. Copies are no nodes: a thick arrow says that data moves.

const MOST = 90, SCOPES = 30, BANDS = 48, ABREAST = 5, RANK = 58, NODE = 32;

const canvas = document.getElementById("graph");
const runs = Array.from({ length: data.each }, (_, item) => item).filter(item => !isCopy(item));  // tasks, of the first run
const many = runs.length > MOST;
const taskPredecessors = item => through(item, other => needs[other]).filter(other => !isCopy(other));
const taskSuccessors = item => through(item, successors).filter(other => !isCopy(other));

const drawing = { nodes: [], edges: [], found: null, scale: 1, left: 0, top: 0, levels: 2, how: "whole", opened: [], moved: false };

// ---- what is drawn

// The scope of a task: the path of its module, or what precedes the last point of its name.
const scopes = runs.map(item => (module(item) || data.name[item].split(".").slice(0, -1).join(".")).split(".").filter(Boolean));
const scopeOf = new Map(runs.map((item, i) => [item, scopes[i]]));

const single = item => ({ items: [item], name: brief(item), under: [module(item), device(item)].filter(Boolean).join(", ") });

function folded(items) {
  if (items.length <= MOST) return items.map(single);
  const deepest = Math.min(items.reduce((most, item) => Math.max(most, scopeOf.get(item).length), 0), 8);
  for (let depth = deepest; depth > 0; depth--) {
    for (const split of [true, false]) {
      const found = grouped(items, item => {
        const scope = scopeOf.get(item).slice(0, depth).join(".");
        return [scope || "(no module)", phased ? phase(item) : "", split ? device(item) : ""];
      });
      if (found.length <= SCOPES && found.length >= 6) return found;
    }
  }
  return banded(items);
}

function grouped(items, key) {
  const found = new Map();
  for (const item of items) {
    const words = key(item), id = words.join("\n");
    if (!found.has(id)) found.set(id, { items: [], name: words[0], under: words.slice(1).filter(Boolean).join(", ") });
    found.get(id).items.push(item);
  }
  return [...found.values()];
}

// Without scopes: tasks of a device that are about equally deep in the graph.
function banded(items) {
  const depth = new Map();
  for (const item of items) depth.set(item, Math.max(0, ...taskPredecessors(item).map(other => (depth.get(other) ?? -1) + 1)));
  const devices = new Set(items.map(device)).size, split = devices <= 6 ? devices : 1;
  const deepest = items.reduce((most, item) => Math.max(most, depth.get(item)), 0) + 1;
  const bands = Math.min(Math.floor(BANDS / split), deepest, 12);
  const of = item => Math.floor((depth.get(item) * bands) / deepest);
  const found = grouped(items, item => [`part ${of(item) + 1}`, split > 1 || devices === 1 ? device(item) : `${devices} devices`]);
  for (const node of found) node.band = of(node.items[0]);
  return found.sort((a, b) => a.band - b.band);
}

// The nearest predecessors and successors, some levels of them and some of each level: as many as can be read.
function around(item) {
  item %= data.each;
  const start = isCopy(item) ? [...taskPredecessors(item), ...taskSuccessors(item)] : [item];
  const found = new Set(start);
  for (const next of [taskPredecessors, taskSuccessors]) {
    let edge = start;
    for (let level = 0; level < drawing.levels; level++) {
      const first = level === 0 ? 2 * ABREAST : ABREAST;
      edge = [...new Set(edge.flatMap(next))].filter(other => !found.has(other)).slice(0, first);
      for (const other of edge) found.add(other);
    }
  }
  return [...found].sort((a, b) => a - b);
}

// When the items of a node begin and end: those that take time, if there are such. What did not run comes last.
function timed(node) {
  const t = shown(), there = node.items.filter(item => t.ran(item)), lasting = there.filter(item => t.seconds[item] > 0);
  const items = lasting.length ? lasting : there;
  node.begins = items.reduce((least, item) => Math.min(least, t.start[item]), Infinity);
  node.ends = items.reduce((most, item) => Math.max(most, t.end(item)), -Infinity);
  node.middle = items.length ? items.reduce((sum, item) => sum + (t.start[item] + t.end(item)) / 2, 0) / items.length : Infinity;
  return node;
}
const inTime = (a, b) => (a.middle === b.middle ? 0 : a.middle - b.middle);

function rebuild() {
  const near = drawing.how === "around" && one() >= 0;
  const within = drawing.opened.at(-1) ?? { items: runs };
  drawing.nodes = near ? around(one()).map(single) : folded(within.items);
  const parts = drawing.nodes.some(node => node.items.length > 1);
  if (parts) drawing.nodes = drawing.nodes.map(timed).sort(inTime);
  const node = new Map();
  drawing.nodes.forEach((n, i) => { for (const item of n.items) node.set(item, i); });
  const edges = new Map();
  const link = (a, b, kind) => {
    const [from, to] = [node.get(a), node.get(b)];
    if (from === undefined || from === to) return;
    if (drawing.nodes[from].band !== undefined && drawing.nodes[from].band === drawing.nodes[to].band) return;
    const key = from * drawing.nodes.length + to, known = edges.get(key);
    if (!known) edges.set(key, { from, to, kind, count: 1 });
    else { known.count++; if (kind === "move" || known.kind === "after") known.kind = kind; }
  };
  for (const item of node.keys()) {
    for (const other of taskPredecessors(item)) link(other, item, device(other) === device(item) ? "data" : "move");
    if (!many || near) for (const other of after[item]) link(other, item, "after");
  }
  drawing.edges = thickest([...edges.values()]);
  const ink = canvas.getContext("2d");
  ink.font = FONT;
  for (const n of drawing.nodes) {
    n.more = n.items.length > 1 ? `${n.items.length} tasks` : "";
    n.below = [n.under, n.more].filter(Boolean).join(": ");
    n.wide = Math.min(Math.max(width(ink, n.name), width(ink, n.below) * 0.8) + 20, 170);
  }
  drawing.found = layered(drawing.nodes.map(n => n.wide), drawing.edges.map(({ from, to }) => [from, to]), parts ? drawing.nodes : null);
  drawing.ofItem = node;
  drawing.moved = false;
  say();
}

// Of the arrows between parts that are folded, those that stand for most: too many would hide each other.
function thickest(edges) {
  if (edges.length <= 2.5 * drawing.nodes.length || drawing.nodes.every(node => node.items.length === 1)) return edges;
  const kept = new Set();
  for (const [end, most] of [["to", 2], ["from", 1]]) {
    const meeting = new Map();
    for (const edge of edges) meeting.set(edge[end], [...(meeting.get(edge[end]) ?? []), edge]);
    for (const mine of meeting.values()) mine.sort((a, b) => b.count - a.count).slice(0, most).forEach(edge => kept.add(edge));
  }
  return edges.filter(edge => kept.has(edge));
}

function say() {
  const near = drawing.how === "around" && one() >= 0, where = document.getElementById("where");
  where.replaceChildren();
  if (!near && drawing.opened.length) {
    where.append(button("‹ back", () => { drawing.opened.pop(); rebuild(); drawGraph(); }), ` ${drawing.opened.at(-1).name}`);
  } else {
    const all = `${runs.length.toLocaleString("en")} tasks${many ? ", folded: double-click opens" : ""}`;
    where.append(near ? `around ${label(one())}` : all);
  }
  document.getElementById("whole").setAttribute("aria-pressed", String(!near));
  document.getElementById("around").setAttribute("aria-pressed", String(near));
  document.getElementById("around").disabled = one() < 0;
  for (const id of ["fewer", "more"]) document.getElementById(id).hidden = !near;
}

// ---- drawing

const spot = i => [drawing.left + drawing.found.x[i] * drawing.scale, drawing.top + (drawing.found.rank[i] * RANK + NODE / 2) * drawing.scale];

function fitGraph(wide, high) {
  const { found } = drawing, full = found.ranks * RANK;
  drawing.scale = Math.min(1, (wide - 30) / Math.max(found.width, 1), (high - 24) / Math.max(full, 1));
  if (!printing) drawing.scale = Math.max(drawing.scale, 0.45);
  drawing.left = Math.max((wide - found.width * drawing.scale) / 2, 15);
  drawing.top = Math.max((high - full * drawing.scale) / 2, 12);
  const chosen = [...new Set(state.chosen.map(nodeOf))].find(node => node !== undefined);
  if (chosen !== undefined) centre(chosen, wide, high);
}
function centre(node, wide, high) {
  const [px, py] = spot(node), margin = 50;
  if (px < margin || px > wide - margin) drawing.left += wide / 2 - px;
  if (py < margin || py > high - margin) drawing.top += high / 2 - py;
}
const nodeOf = any => nodeOfFirst(any % data.each);
const nodeOfFirst = item => drawing.ofItem.get(isCopy(item) ? needs[item].find(o => !isCopy(o)) ?? users[item][0] : item);

function drawGraph() {
  const [ink, wide, high] = sized(canvas);
  if (!wide || !drawing.found) return;
  if (!drawing.moved) fitGraph(wide, high);
  const marks = new Map();
  for (const [item, how] of state.related) {
    const node = nodeOf(item);
    if (node !== undefined && marks.get(node) !== "chosen" && !(isCopy(item) && how !== "chosen")) marks.set(node, how);
  }
  const hits = new Set(state.chosen.length ? [] : state.hits.map(nodeOf));
  const faded = marks.size > 0 || hits.size > 0;
  const ends = ports();
  drawing.edges.forEach((edge, i) => drawEdge(ink, edge, drawing.found.routes[i], ends[i], faded, marks));
  drawing.nodes.forEach((node, i) => drawNode(ink, node, i, faded, hits.has(i) ? "found" : marks.get(i)));
}

// Where each edge leaves and enters, spread over the width of its nodes by where it goes.
function ports() {
  const ends = drawing.edges.map(() => [0, 0]);
  for (const side of [0, 1]) {
    const meeting = new Map();
    drawing.edges.forEach((edge, i) => {
      const node = side ? edge.to : edge.from;
      if (!meeting.has(node)) meeting.set(node, []);
      meeting.get(node).push(i);
    });
    for (const [node, mine] of meeting) {
      const towards = i => drawing.found.routes[i].at(side ? -2 : 1)[0];
      const step = Math.min(12, (drawing.nodes[node].wide - 14) / mine.length);
      mine.sort((a, b) => towards(a) - towards(b));
      mine.forEach((i, at) => { ends[i][side] = (at - (mine.length - 1) / 2) * step; });
    }
  }
  return ends;
}

function drawEdge(ink, edge, route, [leaves, enters], faded, marks) {
  const { scale, left, top } = drawing;
  const up = route[0][1] > route.at(-1)[1], half = ((up ? -NODE : NODE) / 2) * scale;
  const points = route.map(([px, rank]) => [left + px * scale, top + (rank * RANK + NODE / 2) * scale]);
  const first = points[0], last = points.at(-1);
  points[0] = [first[0] + leaves * scale, first[1] + half];
  points[points.length - 1] = [last[0] + enters * scale, last[1] - half];
  const chosen = [marks.get(edge.from), marks.get(edge.to)];
  const inside = chosen.every(mark => mark === "chosen");
  const how = inside ? "" : chosen[1] === "chosen" ? "predecessor" : chosen[0] === "chosen" ? "successor" : "";
  ink.strokeStyle = ink.fillStyle = how ? palette[how] : edge.kind === "move" ? palette.stripe : palette.muted;
  ink.globalAlpha = how ? 1 : faded && !inside ? 0.22 : drawing.edges.length > 200 ? 0.45 : 0.75;
  ink.lineWidth = (how ? 2 : edge.kind === "move" ? 2.2 : 1.1) * Math.max(scale, 0.5);
  ink.setLineDash(edge.kind === "after" ? [4, 3] : []);
  ink.beginPath();
  ink.moveTo(...points[0]);
  for (let i = 1; i < points.length; i++) {
    const [[x1, y1], [x2, y2]] = [points[i - 1], points[i]], bend = (y2 - y1) * 0.45;
    ink.bezierCurveTo(x1, y1 + bend, x2, y2 - bend, x2, y2);
  }
  ink.stroke();
  ink.setLineDash([]);
  const [px, py] = points.at(-1), tip = (up ? -6 : 6) * Math.max(scale, 0.5);
  ink.beginPath();
  ink.moveTo(px, py);
  ink.lineTo(px - Math.abs(tip) * 0.55, py - tip);
  ink.lineTo(px + Math.abs(tip) * 0.55, py - tip);
  ink.fill();
  ink.globalAlpha = 1;
}

function drawNode(ink, node, i, faded, how) {
  const { scale } = drawing, [px, py] = spot(i), wide = node.wide * scale, high = NODE * scale;
  const view = node.items.length === 1 && views.has(node.items[0]), look = palette[kind(node.items[0])];
  const pale = faded && !how;
  ink.globalAlpha = pale ? (drawing.how === "around" ? 0.5 : 0.3) : 1;
  ink.beginPath();
  ink.roundRect(px - wide / 2, py - high / 2, wide, high, 5 * scale);
  ink.fillStyle = view ? palette.paper : look;
  ink.fill();
  ink.strokeStyle = view ? look : palette.paper;
  ink.lineWidth = 1;
  if (node.items.length > 1) ink.strokeRect(px - wide / 2 + 3 * scale, py - high / 2 + 3 * scale, wide - 6 * scale, high - 6 * scale);
  ink.stroke();
  if (how) {
    ink.strokeStyle = how === "chosen" ? palette.ink : palette[how];
    ink.lineWidth = how === "chosen" ? 3 : 2.5;
    ink.stroke();
  }
  if (scale > 0.44) {
    ink.globalAlpha = pale ? 0.6 : 1;
    ink.fillStyle = view || pale ? palette.ink : palette["on-task"];
    ink.textBaseline = "middle";
    ink.textAlign = "center";
    ink.font = FONT.replace("12px", `${12 * scale}px`);
    ink.fillText(shorten(ink, node.name, wide - 10 * scale), px, py - 6 * scale);
    ink.font = FONT.replace("12px", `${9.5 * scale}px`);
    ink.fillText(shorten(ink, node.below, wide - 8 * scale), px, py + 8 * scale);
    ink.textAlign = "left";
  }
  ink.globalAlpha = 1;
}

function nodeUnder(px, py) {
  return drawing.nodes.findIndex((node, i) => {
    const [cx, cy] = spot(i);
    return Math.abs(px - cx) <= (node.wide / 2) * drawing.scale && Math.abs(py - cy) <= (NODE / 2) * drawing.scale;
  });
}
function zoomGraph(factor, px, py) {
  const scale = Math.min(Math.max(drawing.scale * factor, 0.05), 2.5), by = scale / drawing.scale;
  Object.assign(drawing, { scale, left: px - (px - drawing.left) * by, top: py - (py - drawing.top) * by, moved: true });
  drawGraph();
}
function choose(node) {
  const { items, name, under: below } = drawing.nodes[node];
  select(items, items.length > 1 ? `${name}${below ? `, ${below}` : ""}` : "");
}
function open(node) {
  if (drawing.nodes[node].items.length < 2) return;
  drawing.opened.push(drawing.nodes[node]);
  drawing.how = "whole";
  rebuild();
  drawGraph();
}
