"""What ranks do in tests: each function runs in a process of its own."""

from __future__ import annotations

import operator
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # optimizers do, which takes a second; the processes of jobs are forked after it

import autosched as asc
from autosched.machine.cluster import joined
from autosched.runtime.ranks.exchange import alignments
from autosched.testing.comparing import difference
from tests.runtime.ranks.processes import until
from tests.strategies import inputs_for

# ---- agreements


def agree(how: str) -> list[str]:
    """Agree on numbers and texts, where rank 1 does something else; return what each gives."""
    group = joined()
    calls: list[Any] = [
        lambda: group.gather("numbers", lambda: [group.rank, 7]),
        lambda: group.gather("texts", lambda: 600 * "x" * group.rank) == ["", 600 * "x"],
        lambda: group.together("to do", lambda: _do(how)),
    ]
    if how == "another call" and group.rank == 1:
        calls[2] = lambda: group.gather("another", list)
    found = []
    for call in calls:
        try:
            found.append(str(call()))
        except asc.AutoschedError as error:
            found.append(f"{type(error).__name__}: {error}")
        except ValueError as error:
            found.append(f"own ValueError: {error}")
    return found


def _do(how: str) -> str:
    """Fail on rank 1, before or after an agreement within this one."""
    group = joined()
    if how == "before" and group.rank == 1:
        raise ValueError("of a test")
    group.gather("inside", list)
    if how == "after" and group.rank == 1:
        raise asc.GraphError("of a test")
    return "done"


# ---- values


def odd_values() -> list[Any]:
    """Values of many kinds."""
    base = torch.arange(48.0).view(6, 8)
    return [
        base, base.t(), base[1:4, 2], base[:, ::2], base[0].expand(3, 8), base[:2, :1].expand(2, 5),
        torch.tensor(1.5), torch.zeros(0, 3), torch.tensor([True, False]), base.to(torch.bfloat16),
        torch.view_as_complex(base.view(6, 4, 2)).conj(), torch.nn.Parameter(base + 1),
        base.as_strided((3, 3), (1, 1)), base.flatten()[1:7],
        [base, {"a": (base.t(), base), "b": None}], base.to(torch.int16),
    ]  # fmt: skip


# ---- schedules


def run_drawn(
    graph: asc.Graph, policy: str, streams: int, outputs: Any, count: int = 3
) -> list[str]:
    """Run a drawn graph on all ranks; return what differs from the serial run, on this rank."""
    machine = asc.Machine.cluster(cpu_streams=streams)
    try:
        schedule = asc.schedule(graph, machine, policy=policy, outputs=outputs)
    except asc.ScheduleError as error:
        return [f"refused: {error}"]
    wrong = []
    with schedule:
        for _ in range(count):
            expected = inputs_for(graph)
            torch.manual_seed(0)
            expected |= graph.run_serial(**expected)
            wrong += deviations(schedule, inputs_for(graph), expected)
    return wrong


def deviations(
    schedule: asc.Schedule, given: dict[str, Any], expected: dict[str, Any]
) -> list[str]:
    """Run a schedule; return what differs, on this rank, from the expected outputs and inputs."""
    program, here = schedule.program, {*schedule.machine.here}
    torch.manual_seed(0)
    found = schedule(**{name: given[name] for name in schedule.inputs_here})
    left = found | {name: given[name] for name, device in program.inputs if device in here}
    wrong = [
        f"{name} is {item}, expected {expected[name]}\n{schedule}"
        for name, item in left.items()
        if difference(expected[name], item.cpu())
    ]
    own = {name for name, device in program.outputs if device in here}
    return wrong if found.keys() == own else [*wrong, f"outputs {[*found]}"]


def repeat_tasks() -> tuple[tuple[str, ...], list[str]]:
    """Run a schedule within limits of memory; return the tasks that it repeats, and what differs."""
    graph = asc.Graph("layers")
    h = graph.input("x")
    with graph.on("cpu:1"):
        layers = [h := graph.add(torch.sin, h) for _ in range(8)]
        for layer in reversed(layers):
            h = graph.add(torch.mul, h, layer)
    graph.output(y=h)
    given = {"x": torch.ones(8, 8, dtype=torch.float64)}
    nbytes = given["x"].nbytes
    machine = asc.Machine.cluster().with_devices(lambda d: replace(d, nbytes=5 * nbytes))
    costs = asc.Costs(default_seconds=1e-6, default_nbytes=nbytes)
    with asc.schedule(graph, machine, costs=costs) as schedule:
        wrong = deviations(schedule, given, given | graph.run_serial(**given))
        return schedule.recomputed, wrong


def pass_trees() -> bool:
    """Send a tree of tensors, one of them empty, and plain data; return whether it came."""
    graph = asc.Graph("trees")
    values = [torch.ones(3, 4).t(), {"a": (torch.zeros(0, 3), 2.5)}, torch.ones(2).conj(), "text"]
    sent = graph.add(lambda: values, on="cpu:0")
    graph.output(got=graph.add(lambda tree: tree, sent, on="cpu:1", aliases=sent))
    with asc.schedule(graph, asc.Machine.cluster()) as schedule:
        for _ in range(2):
            outputs = schedule()
            got = outputs.get("got")
            if got is not None and (
                difference(values, got) or alignments(got) != alignments(values)
            ):
                return False
    return True


def change(what: str) -> list[str]:
    """Call a schedule whose values have other shapes from the second call on; return how each ends.

    Of an input on rank 0, or of what a task makes of it.
    """
    calls = [0]

    def first(x: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        return x[: 3 - calls[0]] + 0 if what == "result" else x + 0

    graph = asc.Graph("change")
    x = graph.input("x")
    with graph.on("cpu:0"):
        value = graph.add(first, x, name="first")
    with graph.on("cpu:1"):
        graph.output(y=value * 2)
    with asc.schedule(graph, asc.Machine.cluster()) as schedule:
        ended = []
        for number in (0, 1, 0):
            shape = (3, 1 + number) if what == "input" else (3, 1)
            ended.append(_ended(schedule, torch.ones(shape)))
    return ended


def _ended(schedule: asc.Schedule, x: Any, timeout: float | None = None) -> str:
    """Return how a call ended: the first number of its output, if it is here, or an error."""
    begun = time.monotonic()
    try:
        found = schedule(**dict.fromkeys(schedule.inputs_here, x), timeout=timeout)
        text = " ".join(str(item.flatten()[0].item()) for item in found.values())
    except BaseException as error:
        text = f"{type(error).__name__}: {error}"
    return text + (" (late)" if time.monotonic() - begun > 3.5 else "")


# ---- failures


def round_trip(before: Any = torch.abs) -> asc.Graph:
    """Return a graph whose value visits three ranks, and comes home; ``before`` is called on rank 1."""
    graph = asc.Graph("round trip")
    x = graph.input("x")
    with graph.on("cpu:0"):
        a = graph.add(operator.neg, x, name="first")
    with graph.on("cpu:1"):
        b = graph.add(before, a, name="second")
    with graph.on("cpu:2"):
        c = graph.add(torch.mul, b, 2, name="third")
    with graph.on("cpu:0"):
        graph.output(y=graph.add(torch.neg, c, name="fourth"))
    return graph


def fail_in_run(how: str, folder: str) -> list[str]:
    """Let rank 1 fail in the third of four runs; return what each run ended with."""
    runs = [0]

    def before(x: torch.Tensor) -> torch.Tensor:
        runs[0] += 1
        if runs[0] == 3:
            fail(how, Path(folder))
        return x + 1

    machine = asc.Machine.cluster(timeout=5)
    with asc.schedule(round_trip(before), machine) as schedule:
        late = how == "hang" or (how == "hang alone" and machine.rank == 0)
        limits = [None, None, 0.3 if late else None, None]
        return [_ended(schedule, torch.full((3,), n), limits[n]) for n in range(4)]


def go_on(what: str, folder: str) -> str:
    """Run, or give all ranks a large row of rank 0, until a rank has failed; return how that ends."""
    row, group = torch.ones(1 << 24), joined()
    with asc.schedule(round_trip(), asc.Machine.cluster()) as schedule:
        given = {name: torch.ones(1 << 12) for name in schedule.inputs_here}
        try:
            while True:
                if what == "broadcast":
                    group.broadcast(row, 0, "a row")
                else:
                    schedule(**given)
                Path(folder, str(group.rank)).touch()
        except asc.RankError as error:
            return str(error)


def send_large(folder: str) -> str:
    """Send so much that the test can end a process meanwhile; return how that ends."""
    runs = [0]

    def first(x: torch.Tensor) -> torch.Tensor:
        runs[0] += 1
        if runs[0] == 2:
            until(Path(folder, "send").exists)
        return x + 1

    def ready() -> int:
        runs[0] += 1
        if runs[0] == 2:
            Path(folder, "ready").touch()
        return 0

    graph = asc.Graph("large")
    x = graph.input("x")
    with graph.on("cpu:0"):
        a = graph.add(first, x)
    with graph.on("cpu:1"):
        graph.output(ready=graph.add(ready), y=graph.add(torch.neg, a, name="second"))
    with asc.schedule(graph, asc.Machine.cluster(), policy="single") as schedule:
        given = {name: torch.ones(1 << 24) for name in schedule.inputs_here}
        try:
            for _ in range(2):
                schedule(**given)
        except asc.RankError as error:
            return str(error)
    return "nothing"


def fail(how: str, folder: Path) -> None:
    """Fail in a task, or take longer than ranks may take to meet."""
    if how == "long":
        time.sleep(2.6)
        return
    if how == "raise":
        raise ValueError("of a test")
    if how == "interrupt":
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)  # the calling thread may overlook it for a while
        return
    if how.startswith("hang"):
        time.sleep(1)
        return
    (folder / "here").touch()  # the test kills this process
    time.sleep(60)


def differ(what: str) -> str:
    """Make calls that differ on rank 1; return the error."""
    machine = asc.Machine.cluster(timeout=5)
    graph = round_trip() if machine.rank != 1 or what != "graph" else asc.Graph("another")
    if what == "argument" and machine.rank == 1:
        graph = "no graph"  # type: ignore[assignment]
    try:
        if what == "call" and machine.rank == 1:
            asc.Machine.cluster()
        policy = "nonsense" if what == "policy" else "auto"
        with asc.schedule(graph, machine, policy=policy) as schedule:
            if what == "input":
                schedule(**({} if machine.rank == 0 else {"x": 1}))
    except asc.AutoschedError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def keep_memory() -> tuple[int, int]:
    """Return how many addresses a value has in which it is received in ten runs, and an output."""
    seen: list[set[int]] = [set(), set()]

    def note(x: torch.Tensor) -> torch.Tensor:
        seen[0].add(x.data_ptr())
        return x * 2

    kept = []
    with asc.schedule(round_trip(note), asc.Machine.cluster(), outputs="cpu:2") as schedule:
        for _ in range(10):
            found = schedule(**{name: torch.ones(3) for name in schedule.inputs_here})
            kept += found.values()  # later runs must not write there
            seen[1] |= {item.data_ptr() for item in found.values()}
    assert all(bool((item == 4).all()) for item in kept)
    return len(seen[0]), len(seen[1])


def keep_lists() -> bool:
    """Return whether lists of tensors that runs returned stay as they are in later runs."""
    graph = asc.Graph("lists")
    sent = graph.add(lambda x: [x * 1, (x * 2,)], graph.input("x"), on="cpu:0")
    graph.output(got=graph.add(lambda tree: tree, sent, on="cpu:1", aliases=sent))
    kept = []
    with asc.schedule(graph, asc.Machine.cluster(), inputs="cpu:0") as schedule:
        for number in range(4):
            given = {name: torch.full((3,), float(number)) for name in schedule.inputs_here}
            kept += schedule(**given).values()
    return all(
        one.tolist() == [number] * 3 and two.tolist() == [2 * number] * 3
        for number, (one, (two,)) in enumerate(kept)
    )


def profile() -> tuple[list[str], float]:
    """Profile a run; return the instructions that the timeline of this rank has, and its seconds."""
    with asc.schedule(round_trip(), asc.Machine.cluster()) as schedule:
        given = {name: torch.ones(1000) for name in schedule.inputs_here}
        found = schedule.profile(**given, repeat=2, warmup=1)
        return [span.name for span in found.spans], found.makespan


def fork() -> list[Any]:
    """Fork after a run; the child has joined nothing, and connections stay whole."""
    machine = asc.Machine.cluster()
    with asc.schedule(round_trip(), machine) as schedule:
        found: list[Any] = [_ended(schedule, torch.ones(3))]
        child = os.fork()
        if not child:
            os._exit(0 if machine.rank is None else 1)
        found.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        return [*found, _ended(schedule, torch.ones(3))]
