// Mouse and keys, and what redraws when.

const byId = id => document.getElementById(id);

function changed(what) {
  if (what === "selection") {
    follow();
    byId("spoken").textContent = one() >= 0 ? `${label(one())}, ${describeShort(one())}` : state.group;
    if (tab === "facts" || tab === "program") showPanel();
  }
  if (what === "mode") { showPanel(); showModes(); }
  byId("towards").disabled = !state.chosen.length;
  byId("found").textContent = byId("search").value ? found() : "";
  if (what === "search") mark();
  redraw();
}
const found = () => (state.hits.length ? `${state.hit < 0 ? "" : `${state.hit + 1} of `}${state.hits.length.toLocaleString("en")}` : "none");

// ---- commands

function step(by) {
  if (!state.hits.length) return;
  state.hit = (state.hit + by + state.hits.length) % state.hits.length;
  go(state.hits[state.hit]);
}
function go(item) { if (item >= 0) { select([item]); reveal([item]); } }
function back() {
  const item = one(), waits = item < 0 ? -1 : shown().last[item];
  go(waits >= 0 ? waits : predecessors(item)?.[0] ?? -1);
}
function onward() {
  const next = one() < 0 ? [] : successors(one()).filter(item => shown().ran(item));
  go(next.reduce((best, item) => (best < 0 || shown().start[item] < shown().start[best] ? item : best), -1));
}
function neighbour(by) {
  const row = one() >= 0 ? data.on[one()][0] : 0, items = shown().rows[row];
  const at = one() >= 0 ? items.indexOf(one()) + by : 0;
  go(items[Math.min(Math.max(at, 0), items.length - 1)] ?? -1);
}
function clear() {
  if (byId("search").value) { byId("search").value = ""; search(""); }
  select([]);
}
function setMode(mode) { state.mode = mode; changed("mode"); }

const ARROWS = { ArrowLeft: "←", ArrowRight: "→", ArrowUp: "↑", ArrowDown: "↓", Escape: "Esc" };
const KEYS = [
  [["ArrowLeft"], "pan to the left", () => pan(-0.2)],
  [["ArrowRight"], "pan to the right", () => pan(0.2)],
  [["ArrowUp"], "scroll rows up", () => pan(0, -60)],
  [["ArrowDown"], "scroll rows down", () => pan(0, 60)],
  [["+", "="], "zoom in", () => zoom(0.6)],
  [["-"], "zoom out", () => zoom(1 / 0.6)],
  [["0", "Home"], "show all", fit],
  [["f"], "zoom to the selection", () => reveal(state.chosen, true)],
  [["/"], "search", () => byId("search").select()],
  [["Enter"], "next hit of the search", () => step(1)],
  [["Shift+Enter"], "hit before", () => step(-1)],
  [["n"], "next task on the same stream", () => neighbour(1)],
  [["p"], "task before on the same stream", () => neighbour(-1)],
  [["["], "what the selection waited for", back],
  [["]"], "the first that needs the selection", onward],
  [["w"], "the whole graph", () => showView(0)],
  [["b"], "the graph around what is shown of it", up],
  ...(names.length < 2 ? [] : [
    [["1"], "predicted times", () => setMode("predicted")],
    [["2"], "measured times", () => setMode("measured")],
    [["3"], "both", () => setMode("both")],
  ]),
  [["Escape"], "clear selection and search", clear],
  [["?"], "this list", () => byId("help").showModal()],
];
const commandOf = key => KEYS.find(([keys]) => keys.includes(key))?.[2];
document.addEventListener("keydown", event => {
  if (event.ctrlKey || event.metaKey || event.altKey || byId("help").open) return;
  const typing = event.target === byId("search"), inText = details.contains(event.target) && event.key.startsWith("Arrow");
  if (inText || (typing && !["Enter", "Escape"].includes(event.key))) return;
  if (event.target.tagName === "BUTTON" && event.key === "Enter") return;
  const key = event.shiftKey && event.key === "Enter" ? "Shift+Enter" : event.key;
  const press = commandOf(key);
  if (!press) return;
  event.preventDefault();
  if (typing && key === "Escape") gantt.focus();
  press();
});
byId("bindings").append(...[
  ["click, double-click", "select; in the graph, open a folded part"], ["drag", "pan"],
  ["wheel", "zoom; over the names, scroll rows"], ["Shift + wheel", "pan in time"],
].map(([keys, does]) => make("tr", make("td", make("kbd", keys)), make("td", does))),
  ...KEYS.map(([keys, does]) => make("tr", make("td", make("kbd", keys.map(key => ARROWS[key] ?? key).join("  "))), make("td", does))));

byId("search").addEventListener("input", event => search(event.target.value));
for (const made of document.querySelectorAll("[data-key]")) made.addEventListener("click", commandOf(made.dataset.key));

function showModes() {
  const modes = names.length > 1 ? [...names, "both"] : [];
  byId("modes").replaceChildren(...modes.map(mode => {
    const made = button(mode[0].toUpperCase() + mode.slice(1), () => setMode(mode));
    made.setAttribute("aria-pressed", String(mode === state.mode));
    return made;
  }));
}

// ---- the mouse: a drag pans; a click selects

function within(on, event) {
  const { left, top } = on.getBoundingClientRect();
  return [event.clientX - left, event.clientY - top];
}
function dragged(on, move, click) {
  on.addEventListener("pointerdown", event => {
    let last = [event.clientX, event.clientY], far = 0;
    const moving = e => {
      far += Math.abs(e.clientX - last[0]) + Math.abs(e.clientY - last[1]);
      if (far > 3) move(e.clientX - last[0], e.clientY - last[1], e);
      last = [e.clientX, e.clientY];
    };
    const done = e => {
      window.removeEventListener("pointermove", moving);
      window.removeEventListener("pointerup", done);
      if (far <= 3) click?.(...within(on, e));
    };
    window.addEventListener("pointermove", moving);
    window.addEventListener("pointerup", done);
  });
}
dragged(gantt, (dx, dy) => pan(-dx / (view.wide - view.gutter), -dy), (px, py) => {
  const item = under(px, py);
  select(item < 0 ? [] : [item]);
});
gantt.addEventListener("pointermove", event => {
  const item = event.buttons ? -1 : under(...within(gantt, event));
  gantt.classList.toggle("over", item >= 0);
  if (item < 0) return showTip(-1, event);
  // The rows of an item stay in view, however much is said of it.
  const top = gantt.getBoundingClientRect().top - view.top, own = data.on[item].map(row => ofStream.get(row));
  showTip(item, event, [top + Math.min(...own.map(row => row.y)), top + Math.max(...own.map(row => row.y + row.high)) + 4]);
});
for (const on of [gantt, graph]) on.addEventListener("pointerleave", event => showTip(-1, event));
gantt.addEventListener("dblclick", () => reveal(state.chosen, true));
gantt.addEventListener("wheel", event => {
  event.preventDefault();
  const [px] = within(gantt, event);
  if (px < view.gutter && !event.ctrlKey) pan(0, event.deltaY);
  else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) pan((event.deltaX || event.deltaY) / view.wide);
  else zoom(Math.exp(Math.max(-60, Math.min(60, event.deltaY)) * 0.004), when(px));
}, { passive: false });
dragged(graph, (dx, dy) => graph.scrollBy(-dx, -dy));
graph.addEventListener("click", event => {
  const box = nodeAt(event.target), { members, text } = data.views[drawing.view];
  if (box < 0) return select([]);
  select(members[box], text[box]);
  reveal(state.chosen);
});
graph.addEventListener("pointermove", event => {
  const items = data.views[drawing.view].members[nodeAt(event.target)] ?? [];
  showTip(event.buttons || items.length !== 1 ? -1 : items[0], event);
});
graph.addEventListener("dblclick", event => open(nodeAt(event.target)));
graph.addEventListener("wheel", event => {
  if (!event.ctrlKey) return;
  event.preventDefault();
  const by = Math.exp(-Math.max(-60, Math.min(60, event.deltaY)) * 0.004);
  zoomGraph(Math.min(Math.max(drawing.scale * by, 0.05), 2.5), ...within(graph, event));
}, { passive: false });
dragged(byId("upright"), (dx, dy, event) => {
  const wide = Math.max(window.innerWidth - event.clientX, 120);
  document.querySelector("main").style.setProperty("--side", `${wide}px`);
});

// ---- sizes, paper

new ResizeObserver(() => { draw(); fitGraph(); }).observe(document.querySelector("main"));

function print(begins) {
  printing = begins;
  if (begins) fit();
  gantt.style.cssText = begins ? `flex: none; width: 1000px; height: ${view.full + 4}px` : "";
  fitGraph();
  draw();
}
window.addEventListener("beforeprint", () => print(true));
window.addEventListener("afterprint", () => print(false));

// For tests and benchmarks.
Object.assign(window.autosched, {
  count, data, state, view, drawing, select, search, zoom, fit, reveal, rows, x, setMode, showView, label,
  drawNow() { draw(); gantt.lastChild.getBBox(); return view.redrawMs; },
});

showModes();
showView(0);
showPanel();
draw();
window.autosched.readyMs = performance.now();
