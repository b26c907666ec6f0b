import base64
import json
import random
import re
import zlib
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

import autosched as asc
from autosched import demo
from autosched._lib.allowed import is_name
from autosched.demo import mlp_step
from autosched.graph.task import Origin
from autosched.timeline.timeline import Span, Timeline
from autosched.viz import page_html
from tests.viz.looking import look, needs_browser

HOSTILE = (
    "</script><script>throw1</script>",
    "<img/src=x>",
    "\"'&amp;",
    "\U0001f600",
    "__proto__",
    "constructor",
)


class Reader(HTMLParser):
    """Collects the elements of a page and their attributes."""

    def __init__(self, page):
        super().__init__()
        self.opened, self.attributes = [], []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.opened.append(tag)
        self.attributes += attrs


def held(page):
    """What is packed into a page."""
    packed = re.search('<script id="data" type="text/plain">(.*?)</script>', page)[1]
    return json.loads(zlib.decompress(base64.b64decode(packed)))


def planned(graph, gpus=2, **options):
    return asc.schedule(graph, asc.Machine.emulated(gpus=gpus), **options)


def drawn(schedule, measured=None, **texts):
    return page_html(schedule.graph, schedule.program, schedule.simulate(), measured, **texts)


def add(*numbers):
    return sum(numbers)


def hostile():
    """A graph whose names try to be anything but names."""
    graph = asc.Graph("</title><script>throw 2</script>")
    value = graph.input("x")
    for i, name in enumerate(HOSTILE):
        value = graph.add(add, value, name=name, on=f"cuda:{i % 2}")
    graph.output(y=value)
    return planned(graph)


def layered(tasks):
    rng = random.Random(0)
    graph = asc.Graph(f"{tasks} tasks")
    values = list(graph.inputs("x", "y", "z"))
    for _ in range(tasks):
        values.append(
            graph.add(
                add, *rng.sample(values[-100:], 3), seconds=rng.uniform(1e-5, 1e-3), nbytes=10**5
            )
        )
    graph.output(*values[-100:])
    return graph


def late(timeline, seconds):
    """The same timeline, measured as it were: all begins later."""
    spans = (
        Span(s.kind, s.name, s.streams, s.start + seconds, s.end + seconds, s.instruction)
        for s in timeline.spans
    )
    return Timeline(tuple(spans), timeline.arrows)


ELEMENTS = Reader(drawn(planned(asc.Graph("no tasks"), gpus=0))).opened


# ---- what is in it


@pytest.mark.parametrize("make", [mlp_step, lambda: layered(60)])
def test_a_page_holds_every_span_with_its_times(make):
    schedule = planned(make(), policy="round_robin")
    timeline, data = schedule.simulate(), held(drawn(schedule))
    times = data["timelines"]["predicted"]
    rows = [tuple("/".join(data["streams"][row]) for row in on) for on in data["on"]]
    ends = [start + taken for start, taken in zip(times["start"], times["taken"], strict=True)]
    found = list(zip(data["name"], rows, times["start"], ends, strict=True))
    exact = sorted(timeline.spans, key=lambda span: span.instruction)
    whole = [[round(time * 1e9) for time in (span.start, span.end)] for span in exact]
    assert found == [
        (s.name, tuple(map(str, s.streams)), *w) for s, w in zip(exact, whole, strict=True)
    ]


def test_what_was_copied_comes_from_the_copy():
    data = held(drawn(planned(mlp_step())))
    needs = {
        name: {
            data["name"][i - back] + ("*" if data["way"][i - back] else "")
            for back in data["needs"][i]
        }
        for i, name in enumerate(data["name"])
        if not data["way"][i]
    }
    assert needs["dw1"] == {"dw1.0*", "dw1.1*"}
    assert needs["dw2.0"] == {"a.0", "ds.0"}
    copies = [i for i, way in enumerate(data["way"]) if way and data["name"][i] == "dw1.0"]
    assert [[data["name"][i - back] for back in data["needs"][i]] for i in copies] == [["dw1.0"]]
    assert {data["way"][i] for i in copies} == {"cuda:0 \u2192 cpu"}


def test_a_page_shows_where_a_task_was_added_and_not_where_users_keep_their_files():
    page = drawn(planned(mlp_step()))
    data = held(page)
    assert {source.partition(":")[0] for source in data["source"]} == {"", "autosched/demo.py"}
    assert str(demo.__file__) not in page + json.dumps(data)


def test_a_page_has_the_texts_that_there_are():
    schedule = planned(mlp_step())
    assert list(held(drawn(schedule))["texts"]) == ["program"]
    data = held(drawn(schedule, explanation="because", code="x\n" * 7000))
    assert data["texts"]["explanation"] == "because"
    assert data["texts"]["program"] == str(schedule)
    assert data["texts"]["code"].endswith("x\n... and 1,001 more lines of the code")


def test_the_page_of_ten_thousand_spans_is_smaller_than_a_megabyte():
    schedule = planned(layered(4000), gpus=3, policy="round_robin")
    spans = schedule.simulate()
    assert len(spans.spans) >= 10_000
    code = "    value = function(another)  # on a stream\n" * 20_000
    assert len(drawn(schedule, late(spans, 1e-3), code=code)) < 1_000_000


def test_a_page_asks_for_nothing():
    page = drawn(planned(mlp_step()))
    reader = Reader(page)
    assert any("default-src 'none'" in (text or "") for _, text in reader.attributes)
    assert not {"src", "href", "action"} & {name for name, _ in reader.attributes}
    assert not re.search(r"https?://|url\((?!#)|@import|fetch\(", page)


TEXTS = st.one_of(
    st.text(),
    st.lists(st.sampled_from(["</script>", "<b>", "<!--", "$data", "&lt;", '"', "\n"])).map(
        "".join
    ),
)


@given(TEXTS, TEXTS, st.lists(TEXTS.filter(is_name), min_size=1, max_size=4, unique=True))
def test_names_and_texts_are_text_whatever_they_are(title, text, names):
    graph = asc.Graph("names")
    value = graph.input("\x00input")
    for name in names:
        value = graph.add(add, value, name=name)
    page = drawn(planned(graph, gpus=0), title=title or "names", explanation=text)
    data = held(page)
    assert Reader(page).opened == ELEMENTS
    assert data["name"] == names
    assert data["texts"].get("explanation", "") == text
    page.encode()


def test_a_report_is_a_file(tmp_path):
    schedule = planned(mlp_step())
    schedule.report(tmp_path / "page.html", title="<i>")
    data = held((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert data["texts"]["code"] == schedule.code
    assert "<title>&lt;i&gt;</title>" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_a_page_knows_how_much_memory_devices_have():
    machine = asc.Machine([asc.Device("cpu", nbytes=1e9)])
    graph = asc.Graph()
    graph.output(y=graph.add(add, graph.input("x"), name="t"))
    assert held(asc.schedule(graph, machine).page())["limits"] == {"cpu": 10**9}
    assert held(drawn(planned(graph)))["limits"] == {}


# ---- what a browser makes of it


def opened(tmp_path, page, script, **options):
    file = tmp_path / "page.html"
    file.write_text(page, encoding="utf-8")
    return look(file, f"const a = window.autosched; await a.ready; {script}", **options)


@needs_browser
def test_a_selection_marks_predecessors_and_successors_and_nothing_else(tmp_path):
    schedule = planned(mlp_step())
    graph = schedule.graph
    script = """return a.data.name.map((name, item) => {
        a.select([item]);
        const tasks = [...a.state.related].filter(([i]) => !a.data.way[i]);
        const marked = how => tasks.filter(([, h]) => h === how).map(([i]) => a.data.name[i]);
        return [name, a.data.way[item] !== "", marked("predecessor").sort(), marked("successor").sort()];
    });"""
    found = opened(tmp_path, drawn(schedule, late(schedule.simulate(), 1e-5)), script, dark=True)
    names = [task.name for task in graph.tasks]
    for name, is_copy, before, behind in found:
        if not is_copy:
            task = graph.task(name)
            assert before == sorted({names[d.task] for d in task.dependencies}), name
            assert behind == sorted({names[user] for user in graph.users[task.index]}), name
    assert sum(not is_copy for _, is_copy, _, _ in found) == len(graph)


@needs_browser
def test_a_page_draws_each_span_once_in_every_row_that_it_has(tmp_path):
    schedule = planned(mlp_step())
    spans = schedule.simulate().spans
    boxes = opened(tmp_path, drawn(schedule), "a.drawNow(); return [a.count, a.view.boxes];")
    assert boxes == [len(spans), sum(len(span.streams) for span in spans)]


@needs_browser
def test_keys_find_select_walk_and_clear(tmp_path):
    script = """
        const chosen = () => a.state.chosen.map(a.label), seen = [];
        for (const key of ["/", "s", "g", "d", "Enter"]) await press(key);
        seen.push(chosen());
        for (const key of ["Escape", "n"]) await press(key);
        seen.push(chosen());
        for (const key of ["]", "["]) { await press(key); seen.push(chosen()); }
        const wide = a.view.end - a.view.start;
        await press("+");
        seen.push(a.view.end - a.view.start < wide);
        await press("Escape");
        seen.push(chosen());
        return seen;"""
    schedule = planned(mlp_step())
    first, *rest = opened(tmp_path, drawn(schedule), script)
    assert first in (["sgd_w1"], ["sgd_w2"])
    assert rest == [["x.0"], ["copy x.0"], ["x.0"], True, []]


def trained(blocks):
    """A training step of blocks of five layers, whose tasks take a while each."""
    graph = asc.Graph("trained")
    value, made = graph.input("x"), []
    for phase, order in (("forward", range(blocks)), ("backward", reversed(range(blocks)))):
        for block in order:
            for layer in range(5):
                origin = Origin(("model.py", 1), f"block{block}", phase)
                name = f"block{block}.{phase}{layer}"
                value = graph.record(add, (value,), {}, name=name, origin=origin)
                made.append(name)
    for block in range(blocks):
        origin = Origin(("model.py", 1), f"block{block}", "optimizer")
        graph.output(graph.record(add, (value,), {}, name=f"block{block}.update", origin=origin))
    return planned(graph, policy="single", costs=asc.Costs(default_seconds=1e-3))


@needs_browser
def test_a_part_of_a_graph_opens_and_a_selection_is_seen_where_it_is(tmp_path):
    script = """
        const names = () => a.data.views[a.drawing.view].members.map(items => items.map(a.label));
        const marked = () => names().map((items, i) => [a.drawing.boxes[i].dataset.mark, items]);
        const seen = [names().length, a.drawing.boxes.length];
        a.drawing.boxes[3].firstChild.dispatchEvent(new MouseEvent("dblclick", { bubbles: true }));
        seen.push(names().filter(items => items.length === 1).length > 1);
        await press("w");
        seen.push(a.drawing.view);
        a.select([7]);
        seen.push(marked().filter(([how]) => how === "chosen").map(([, items]) => items), a.label(7));
        return seen;"""
    count, drawn_boxes, opens, view, chosen, name = opened(tmp_path, drawn(trained(10)), script)
    assert 10 <= count == drawn_boxes <= 90
    assert (opens, view, chosen) == (True, 0, [[name]])


@needs_browser
def test_what_is_said_of_a_task_does_not_cover_its_row(tmp_path):
    script = """
        const gantt = document.querySelector("#gantt"), box = gantt.getBoundingClientRect(), found = [];
        for (const row of a.rows) {
            const item = [...Array(a.count).keys()].find(i => a.data.on[i].includes(row.stream));
            if (item === undefined) continue;
            const x = box.left + a.x(0) + 3, y = box.top + row.y + row.high / 2;
            for (let px = x; px < box.right; px += 4) {
                gantt.dispatchEvent(new PointerEvent("pointermove", { clientX: px, clientY: y, bubbles: true }));
                const tip = document.querySelector("#tip");
                if (tip.hidden) continue;
                const told = tip.getBoundingClientRect();
                found.push(told.top >= box.top + row.y + row.high || told.bottom <= box.top + row.y);
                break;
            }
        }
        return found;"""
    found = opened(tmp_path, drawn(planned(mlp_step())), script)
    assert found
    assert all(found)


@needs_browser
def test_an_explanation_leads_to_its_tasks(tmp_path):
    schedule = planned(mlp_step())
    script = """
        [...document.querySelectorAll("#tabs button")].find(b => b.textContent === "Explanation").click();
        const pre = document.querySelector("#details pre"), whole = pre.textContent;
        const press = b => { b.click(); return [b.textContent, a.state.chosen.map(a.label)]; };
        const links = [...pre.querySelectorAll("button")].map(press);
        return [whole, links];"""
    text = str(schedule.explain())
    whole, links = opened(tmp_path, schedule.page(), script)
    assert whole == text
    steps = [
        f"{'copy ' * (step.kind == 'copy')}{step.name}" for step in schedule.explain().critical_path
    ]
    shown = {step for step in steps if f"  {step}, " in text}
    assert len(shown) > 3
    assert shown <= {words for words, _ in links}
    assert all(chosen in ([words], [f"copy {words}"]) for words, chosen in links)


@needs_browser
def test_amounts_are_rounded_before_their_unit_is_chosen(tmp_path):
    graph = asc.Graph("almost")
    graph.output(y=graph.add(add, graph.input("x"), name="t", seconds=0.99996e-3))
    page = drawn(planned(graph, gpus=0), memory={"cpu": [(0.0, 999.9e6)]})
    script = """
        a.drawNow();
        a.select([0]);
        return ["#details", "#gantt"].map(part => document.querySelector(part).textContent);"""
    facts, chart = opened(tmp_path, page, script)
    assert "takes 1 ms" in facts
    assert "at most 1 GB" in chart


@needs_browser
def test_hostile_names_are_shown_as_they_are(tmp_path):
    script = """
        a.select([a.data.name.findIndex((name, item) => name.includes("script") && !a.data.way[item])]);
        document.querySelectorAll("#tabs button")[1].click();
        const program = document.querySelector("#details pre").textContent;
        document.querySelectorAll("#tabs button")[0].click();
        const head = document.querySelector("#details h2").textContent;
        return [document.title, head, program.includes(HOSTILE), document.images.length];
    """.replace("HOSTILE", json.dumps(HOSTILE[0]))
    title, head, shown, images = opened(tmp_path, drawn(hostile()), script)
    assert (title, head, shown, images) == ("</title><script>throw 2</script>", HOSTILE[0], True, 0)


@needs_browser
def test_pages_of_nothing_and_of_much_open_and_print(tmp_path):
    empty = asc.Graph("empty")
    empty.output(y=empty.input("x"))
    assert opened(tmp_path, drawn(planned(empty)), "return a.count;") == 0
    schedule = planned(layered(400), gpus=12, policy="round_robin")
    memory = {device.name: [(0.0, 1e9), (1e-3, 2e9)] for device in schedule.machine.devices}
    page = drawn(schedule, explanation="why", memory=memory)
    script = "a.select([300]); return [a.count, a.drawing.boxes.length < 300];"
    found = opened(tmp_path, page, script, picture=tmp_path / "page.pdf")
    assert found == [len(schedule.simulate().spans), True]
    assert (tmp_path / "page.pdf").read_bytes().startswith(b"%PDF")
