// The graph beside the chart: the drawings of the whole and of each part that opens, as Python made them.

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
    graph.innerHTML = `<svg class="autosched" viewBox="0 0 ${view.size.join(" ")}">${view.svg}</svg>`;
    drawing.arrows = [...graph.querySelectorAll("g[transform] > path")];
    drawing.boxes = [...graph.querySelectorAll("g[transform] > g")];
    drawing.ofItem = new Map();
    view.members.forEach((items, box) => { for (const item of items) drawing.ofItem.set(item, box); });
    fitGraph();
    say();
  }
  mark();
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
  data.views[drawing.view].arrows.forEach(([from, to], i) => {
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
