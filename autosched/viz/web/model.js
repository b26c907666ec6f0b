// What is shown: the page's columns, unpacked, and questions about them. An item is a run or a copy, by its number.

const packed = Uint8Array.from(atob(document.getElementById("data").textContent), letter => letter.charCodeAt(0));
const unpacked = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
const data = JSON.parse(await new Response(unpacked).text());

const count = data.name.length;
for (const view of data.views) view.members = view.members.map(group => data.groups[group]);  // of items
const free = new Set(data.free);
const isCopy = item => data.way[item] !== "";
const device = item => data.streams[data.on[item][0]][0];
const absolute = links => links.map((back, item) => back.map(far => item - far));
let lines = 0;
const lineOf = data.line.map(further => (lines += further));

// The predecessors of each item, and its successors.
const needs = absolute(data.needs), after = absolute(data.after);
const users = Array.from({ length: count }, () => []);
for (let item = 0; item < count; item++) for (const other of [...needs[item], ...after[item]]) users[other].push(item);
const predecessors = item => [...needs[item], ...after[item]];
const successors = item => users[item];
// The same with the tasks at the other ends of copies.
const through = (item, next) => next(item).flatMap(other => (isCopy(other) ? [other, ...through(other, next)] : [other]));

class Times {
  // When each item ran, in nanoseconds; NaN for what did not.
  constructor(columns) {
    this.start = Float64Array.from(columns.start, start => start ?? NaN);
    this.taken = Float64Array.from(columns.taken);
    this.rows = data.streams.map(() => []);
    data.on.forEach((on, item) => { if (this.ran(item)) for (const row of on) this.rows[row].push(item); });
    for (const row of this.rows) row.sort((a, b) => this.start[a] - this.start[b] || a - b);
    this.critical = new Set(columns.critical);
    this.last = columns.last.map((back, item) => (back ? item - back : -1));  // what each item waited for, or -1
    this.arrows = columns.arrows.map(([to, back]) => [to - back, to]);
    this.period = columns.period;
    const all = this.rows.flat();
    this.makespan = all.reduce((most, item) => Math.max(most, this.end(item)), 0);
    this.busy = this.rows.map(row => row.reduce((sum, item) => sum + this.taken[item], 0));
  }
  ran(item) { return !Number.isNaN(this.start[item]); }
  end(item) { return this.start[item] + this.taken[item]; }
}

const times = Object.fromEntries(Object.entries(data.timelines).map(([name, columns]) => [name, new Times(columns)]));
const names = Object.keys(times);
const makespan = Math.max(...names.map(name => times[name].makespan), 1);

// Of a loop, each run has items of its own.
const runOf = item => Math.floor(item / data.each), several = count > data.each;
const ofRun = item => (runOf(item) ? ` of run ${runOf(item)}` : "");
const label = item => (isCopy(item) ? `copy ${data.name[item]}` : data.name[item]) + ofRun(item);
// A name without the path of its module before it.
function brief(item) {
  const path = `${data.module[item]}.`, name = data.name[item];
  return path.length > 1 && name.startsWith(path) ? name.slice(path.length) : name;
}
const place = item => data.way[item] || device(item);
const streamsOf = item => data.on[item].map(row => data.streams[row].join("/")).join(" and ");

// The classes of an item.
const phased = item => (["backward", "optimizer"].includes(data.phase[item]) ? `task ${data.phase[item]}` : "task");
const kind = item => (isCopy(item) ? "copy" : phased(item));

const NS = 1e-9;
const TIMES = [[1, "s"], [1e-3, "ms"], [1e-6, "us"], [1e-9, "ns"]];
const BYTES = [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"], [1, "B"]];
const unitOf = (number, units) => units.find(([scale]) => Math.abs(number) >= scale) ?? units.at(-1);
// A number of so many digits, in the largest unit that it reaches when it is rounded.
function amount(number, digits, units) {
  const rounded = Number(number.toPrecision(digits)), [scale, unit] = unitOf(rounded, units);
  return `${(rounded / scale).toLocaleString("en", { maximumSignificantDigits: 6 })} ${unit}`;
}
const time = (ns, digits = 3) => (ns ? amount(ns * NS, digits, TIMES) : "0 us");
const bytes = number => amount(number, 3, BYTES);

// What is selected: items, of which one alone has a panel of its own.
const state = {
  mode: names.length > 1 ? "both" : names[0], chosen: [], group: "", related: new Map(), hits: [], hit: -1,
};
const one = () => (state.chosen.length === 1 ? state.chosen[0] : -1);
const shown = () => times[state.mode === "both" ? "measured" : state.mode];

function select(items, group = "") {
  state.chosen = items;
  state.group = group;
  state.related = new Map();
  if (items.length === 1) {
    for (const other of through(items[0], predecessors)) state.related.set(other, "predecessor");
    for (const other of through(items[0], successors)) state.related.set(other, "successor");
  }
  for (const item of items) state.related.set(item, "chosen");
  changed("selection");
}

function search(words) {
  const wanted = words.toLowerCase().split(/\s+/).filter(Boolean);
  const said = item => [label(item), data.module[item], data.phase[item], streamsOf(item), data.source[item]];
  const fits = item => wanted.every(word => said(item).join("\n").toLowerCase().includes(word));
  state.hits = wanted.length ? Array.from({ length: count }, (_, item) => item).filter(fits) : [];
  state.hit = -1;
  changed("search");
}
