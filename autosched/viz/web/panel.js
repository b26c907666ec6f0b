// The panel below: facts of what is selected, or of the whole; the explanation, the program and the code. Text goes in
// as text alone, so that no name can be anything else.

const tabs = document.getElementById("tabs"), details = document.getElementById("details");
const LISTED = 40;
let tab = "facts";

// An element: "li", or "li.muted" with a class.
function make(kind, ...children) {
  const [tag, look = ""] = kind.split("."), made = document.createElement(tag);
  made.className = look;
  made.append(...children);
  return made;
}
function button(words, press) {
  const made = make("button", words);
  made.type = "button";
  made.addEventListener("click", press);
  return made;
}
function table(head, lines) {
  const row = (tag, line) => make("tr", ...line.map((words, i) => make(i ? `${tag}.n` : tag, words)));
  return make("table", row("th", head), ...lines.map(line => row("td", line)));
}
function facts(lines) {
  const rows = lines.filter(([, words]) => words).map(([name, words]) => make("tr", make("th", name), make("td", words)));
  return make("table.facts", ...rows);
}
const goto = item => button(label(item), () => go(item));
function list(title, items) {
  const part = make("div", make("h3", `${title} (${items.length})`));
  const shownItems = items.slice(0, LISTED).map(item => make("li", goto(item), make("span.muted", ` ${describeShort(item)}`)));
  part.append(make("ul", ...shownItems));
  if (items.length > LISTED) part.append(make("p", `and ${(items.length - LISTED).toLocaleString("en")} more`));
  return part;
}
const describeShort = item => `${place(item)}${shown().ran(item) ? `, ${time(shown().taken[item])}` : ""}`;

function waiting(item) {
  const t = shown(), last = t.last[item];
  if (last < 0) return ["nothing: it is the first on its stream"];
  const shared = data.on[item].some(row => data.on[last].includes(row));
  const why = predecessors(item).includes(last) ? "which it needs" : shared ? "its stream was busy with that" : "as an event says";
  const gap = t.start[item] - t.end(last);
  return [goto(last), `, ${why}` + (gap > (t.makespan || 1) * 1e-6 ? `; began ${time(gap)} after its end` : "")];
}
function ran(item) {
  return names.map(name => {
    const t = times[name];
    if (!t.ran(item)) return [name, "did not run"];
    return [names.length > 1 ? name : "when", `${time(t.start[item], 5)} to ${time(t.end(item), 5)}, takes ${time(t.taken[item])}`];
  });
}

function showItem(item) {
  const wait = make("span", ...waiting(item));
  details.append(make("h2", label(item)));
  const left = make("div", facts([
    ["module", data.module[item]], ["phase", data.phase[item]],
    [isCopy(item) ? "from, to" : "device", place(item)], ["stream", streamsOf(item)],
    ...ran(item), ["waited for", wait], ["source", data.source[item]], ["calls", data.calls[item]],
    ["critical path", shown().critical.has(item) ? "yes" : ""],
  ]));
  const parts = [left];
  if (needs[item].length) parts.push(list("Needs", needs[item]));
  if (after[item].length) parts.push(list("Comes after", after[item]));
  if (users[item].length) parts.push(list("Is needed by", users[item]));
  details.append(make("div.columns", ...parts));
}

function showGroup() {
  const items = state.chosen, total = items.reduce((sum, item) => sum + (shown().ran(item) ? shown().taken[item] : 0), 0);
  details.append(make("h2", state.group), make("p", `${items.length} tasks, ${time(total)} in all. Double-click it in the graph to look inside.`));
  details.append(list("The longest", [...items].sort((a, b) => shown().taken[b] - shown().taken[a])));
}

function showAll() {
  const t = shown(), tasks = row => t.rows[row].filter(item => !isCopy(item)).length;
  const lines = data.streams.map((stream, row) => [
    stream.join("/"), time(t.busy[row]), time(Math.max(t.makespan - t.busy[row], 0)),
    `${Math.round((100 * t.busy[row]) / (t.makespan || 1))}%`, String(tasks(row)), String(t.rows[row].length - tasks(row)),
  ]);
  const longest = runs.filter(item => t.ran(item)).sort((a, b) => t.taken[b] - t.taken[a]).slice(0, 12);
  const streams = make("div", make("h3", "Streams"), table(["", "busy", "idle", "share", "tasks", "copies"], lines));
  details.append(make("div.columns two", streams, list("The longest tasks", longest)));
}

// Names of tasks, and of copies, in a text: those in quotes, and those of the steps of the critical path, where long
// ones are cut in the middle. The first of several copies of a value counts.
const named = new Map(), copied = new Map();
for (let item = count - 1; item >= 0; item--) (isCopy(item) ? copied : named).set(data.name[item], item);
function itemOf(words) {
  const isOfCopy = words.startsWith("copy "), known = isOfCopy ? copied : named, name = isOfCopy ? words.slice(5) : words;
  if (known.has(name)) return known.get(name);
  const [first, last] = name.split("...");
  if (last === undefined) return isOfCopy ? -1 : copied.get(name) ?? -1;
  const found = [...known.keys()].filter(other => other.startsWith(first) && other.endsWith(last));
  return found.length === 1 ? known.get(found[0]) : -1;
}
function linked(text) {
  const step = /^( +[\d.,]+ [mun]?s +[\d.,]+ [mun]?s  )((?:copy )?.+?)(?=, )/gm, quoted = /(?<=')[^'\n]+(?=')/g;
  const spots = [...text.matchAll(step)].map(found => [found.index + found[1].length, found[2]]);
  spots.push(...[...text.matchAll(quoted)].map(found => [found.index, found[0]]));
  const parts = [];
  let at = 0;
  for (const [from, words] of spots.sort((a, b) => a[0] - b[0])) {
    const item = itemOf(words);
    if (from < at || item < 0) continue;
    parts.push(text.slice(at, from), button(words, () => go(item)));
    at = from + words.length;
  }
  return [...parts, text.slice(at)];
}

function showText(name) {
  const pre = make("pre", ...(name === "explanation" ? linked(data.texts[name]) : [data.texts[name]]));
  details.replaceChildren(pre);
  if (name === "program" && lineOf[one()] < data.texts.program.split("\n").length) {
    const mark = make("mark"), at = lineOf[one()] * 18;
    mark.style.top = `${at}px`;
    pre.append(mark);
    details.scrollTop = at - details.clientHeight / 2;
  }
}

const TABS = { facts: "Selection", explanation: "Explanation", program: "Program", code: "Code" };
function showPanel() {
  tabs.replaceChildren(...Object.keys(TABS).filter(name => name === "facts" || name in data.texts).map(name => {
    const words = name === "facts" && !state.chosen.length ? "Overview" : TABS[name];
    const made = button(words, () => { tab = name; showPanel(); });
    made.setAttribute("role", "tab");
    made.setAttribute("aria-selected", String(tab === name));
    return made;
  }));
  if (tab !== "facts") return showText(tab);
  details.replaceChildren();
  details.scrollTop = 0;
  if (one() >= 0) showItem(one());
  else if (state.chosen.length) showGroup();
  else showAll();
}

// What is said beside the mouse; ``clear`` is the part of the window, from top to bottom, that stays in view.
function showTip(item, event, clear) {
  const tip = document.getElementById("tip");
  tip.hidden = item < 0;
  if (item < 0) return;
  const last = shown().last[item], extra = [data.module[item], data.phase[item]].filter(Boolean).join(", ");
  tip.replaceChildren(make("b", label(item)), facts([
    ["", extra], [isCopy(item) ? "copy" : "on", isCopy(item) ? place(item) : streamsOf(item)], ...ran(item),
    ["waited for", last < 0 ? "" : label(last)], ["source", data.source[item]],
  ]));
  const box = tip.getBoundingClientRect(), below = event.clientY + 18;
  const [top, bottom] = clear ?? [event.clientY, below];
  tip.style.left = `${Math.min(event.clientX + 14, window.innerWidth - box.width - 8)}px`;
  const fits = Math.max(bottom, below) + box.height <= window.innerHeight;
  tip.style.top = `${fits ? Math.max(bottom, below) : Math.max(Math.min(top, event.clientY) - box.height - 10, 0)}px`;
}
