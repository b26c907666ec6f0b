// The graph beside the chart: of the whole and of each part that opens, with boxes and arrows at the places that Python
// found.

const graph = document.getElementById("graph");
const runs = Array.from({ length: data.each }, (_, item) => item).filter(item => !isCopy(item));  // tasks, of the first run
const drawing = { view: -1, scale: 1, boxes: [], arrows: [] };

// The view that each box opens, by view; and the last view that has a task, and so the most detailed.
const opened = data.views.map(() => new Map()), detailed = new Map();
data.views.forEach((view, number) => {
  if (number) opened[view.opens[0]].set(view.opens[1], number);
  view.members.forEach(items => {
    for (const item of items) if (number === 0 || items.length === 1 || !detailed.has(item)) detailed.set(item, number);
  });
});
const taskOf = any => {
  const item = any % data.each;
  return isCopy(item) ? needs[item].find(other => !isCopy(other)) ?? users[item][0] : item;
};

function showView(number) {
  const view = data.views[number];
  if (drawing.view !== number) {
    drawing.view = number;
    graph.innerHTML = `<svg class="autosched" viewBox="0 0 ${view.size.join(" ")}">${view.frame}</svg>`;
    drawing.arrows = view.from.map((_, i) => shape("path", { class: view.kind[i], d: route(view, i) }));
    drawing.boxes = view.x.map((_, box) => boxOf(view, box));
    graph.firstChild.append(...drawing.arrows, ...drawing.boxes);
    drawing.ofItem = new Map();
    view.members.forEach((items, box) => { for (const item of items) drawing.ofItem.set(item, box); });
    fitGraph();
    say();
  }
  mark();
}
function shape(tag, attributes, words = "") {
  const made = document.createElementNS(graph.firstChild.namespaceURI, tag);
  for (const name of Object.keys(attributes)) made.setAttribute(name, attributes[name]);
  made.textContent = words;
  return made;
}
const BOX = 28, PITCH = 50;  // the height of a box, and from one rank to the next
function boxOf(view, box) {
  const made = shape("g", {}), wide = view.width[box], kind = view.look[box], below = view.below[box];
  const x = view.x[box], y = view.first + view.y[box], ink = kind.startsWith("task") ? "on-task middle" : "ink middle";
  for (const by of below ? [4, 0] : [0]) {
    made.append(shape("rect", { class: kind, x: x - wide / 2 + by, y: y - BOX / 2 + by, width: wide, height: BOX, rx: 4 }));
  }
  made.append(shape("text", { class: ink, x, y: y + (below ? -2 : 4) }, view.text[box]));
  if (below) made.append(shape("text", { class: `${ink} label`, x, y: y + 10 }, below));
  return made;
}
// The curve of an arrow: it bends between ranks, where no boxes are; within a rank below the boxes, or above them.
function route(view, i) {
  const to = view.to[i], from = to - view.from[i], x1 = view.x[from] + view.leaves[i], x2 = view.x[to] + view.enters[i];
  const [y1, y2] = [view.first + view.y[from] + BOX / 2, view.first + view.y[to] - BOX / 2], gap = PITCH - BOX;
  const turn = (x, y, across, down) => `C${x} ${(y + down) / 2} ${across} ${(y + down) / 2} ${across} ${down}`;
  if (y1 - y2 === BOX) {
    const y = x1 < x2 ? y1 : y2, bend = y + 0.7 * (x1 < x2 ? gap : -gap);
    return `M${x1} ${y}C${x1} ${bend} ${x2} ${bend} ${x2} ${y}`;
  }
  const by = view.passes[i];
  if (by === null) return `M${x1} ${y1}${turn(x1, y1, x2, y2)}`;
  return `M${x1} ${y1}${turn(x1, y1, by, y1 + gap)}V${y2 - gap}${turn(by, y2 - gap, x2, y2)}`;
}
const up = () => showView(Math.max(data.views[drawing.view].opens[0], 0));
function open(box) { if (opened[drawing.view].has(box)) showView(opened[drawing.view].get(box)); }

function fitGraph() {
  const [wide, high] = data.views[drawing.view].size;
  const fits = Math.min(1, (graph.clientWidth - 4) / wide, (graph.clientHeight - 4) / high);
  zoomGraph(printing ? fits : Math.max(fits, 0.55));
}
function zoomGraph(scale, px = 0, py = 0) {
  const by = scale / drawing.scale, svg = graph.firstChild, [wide, high] = data.views[drawing.view].size;
  const [left, top] = [(graph.scrollLeft + px) * by - px, (graph.scrollTop + py) * by - py];
  drawing.scale = scale;
  svg.setAttribute("style", `width: ${wide * scale}px; height: ${high * scale}px; max-width: none`);
  graph.scrollTo(left, top);
}

function mark() {
  const marks = new Map();
  for (const [item, how] of state.related) {
    const box = drawing.ofItem.get(taskOf(item));
    if (box !== undefined && marks.get(box) !== "chosen" && !(isCopy(item) && how !== "chosen")) marks.set(box, how);
  }
  if (!state.chosen.length) for (const item of state.hits) marks.set(drawing.ofItem.get(taskOf(item)), "found");
  graph.firstChild.classList.toggle("faded", marks.size > 0);
  drawing.boxes.forEach((made, box) => { made.dataset.mark = marks.get(box) ?? ""; });
  const view = data.views[drawing.view];
  view.to.forEach((to, i) => {
    const from = to - view.from[i];
    const inside = marks.get(from) === "chosen" && marks.get(to) === "chosen";
    const how = marks.get(to) === "chosen" ? "predecessor" : marks.get(from) === "chosen" ? "successor" : "";
    drawing.arrows[i].dataset.mark = inside ? "chosen" : how;
  });
  const chosen = drawing.boxes.find(made => made.dataset.mark === "chosen");
  if (chosen && state.chosen.length) chosen.scrollIntoView({ block: "nearest", inline: "nearest" });
}

// The drawing in which a selected task can be seen.
function follow() {
  const item = one() >= 0 ? taskOf(one()) : undefined, view = detailed.get(item);
  const isSingle = data.views[drawing.view].members[drawing.ofItem.get(item)]?.length === 1;
  if (view !== undefined && !isSingle) showView(view); else mark();
}

function say() {
  const all = `${runs.length.toLocaleString("en")} tasks${opened[0].size ? ", folded: double-click opens" : ""}`;
  const back = drawing.view ? [button("\u2039 back", up), ` ${data.views[drawing.view].name}`] : [all];
  document.getElementById("where").replaceChildren(...back);
  document.getElementById("whole").hidden = !drawing.view;
}

const nodeAt = target => drawing.boxes.indexOf(target.parentNode);
function choose(box) {
  const items = data.views[drawing.view].members[box], name = data.views[drawing.view].text[box];
  select(items, items.length > 1 ? name : "");
}
