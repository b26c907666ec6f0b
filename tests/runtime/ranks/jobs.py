"""What ranks do in tests: each function runs in a process of its own."""

from __future__ import annotations

import contextlib
import ctypes
import operator
import os
import signal
import socket
import threading
import time
import warnings
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch._dynamo  # optimizers do, which takes a second; the processes of jobs are forked after it

import autosched as asc
from autosched._lib.copying import ALIGNMENT
from autosched._lib.processes import sockets
from autosched._lib.tree import flatten
from autosched.machine import cluster as cluster_module
from autosched.machine.cluster import joined
from autosched.measurement import ranks as ranks_module
from autosched.runtime.ranks import messages
from autosched.runtime.ranks import session as session_module
from autosched.runtime.ranks import wire as wire_module
from autosched.runtime.ranks.session import session
from autosched.runtime.ranks.wire import lose, new_group
from autosched.testing.strategies import inputs_for
from tests.runtime.ranks.processes import until

# ---- the wire


def ring(count: int) -> bool:
    """Send rows around, of several sizes; return whether they came as they were sent."""
    wire = session().wire()
    right, left = (wire.rank + 1) % wire.size, (wire.rank - 1) % wire.size
    sizes = [1, 100, 1 << 16, (1 << 20) + 1]
    for number in range(count):
        rows = [torch.full((n,), wire.rank + number, dtype=torch.uint8) for n in sizes]
        found = [torch.zeros(n, dtype=torch.uint8) for n in sizes]
        works = [wire.receive(row, left, tag) for tag, row in enumerate(found)]
        works += [wire.send(row, right, tag) for tag, row in reversed([*enumerate(rows)])]
        for work in works:
            work.wait()
        if not all(bool((row == (left + number) % 256).all()) for row in found):
            return False
    return True


def lose_and_renew() -> list[str]:
    """Let rank 0 give up, twice; return what each rank was told, and that a new wire works."""
    told = []
    for number in range(2):
        wire = session().wire()
        if wire.rank == 0:
            session().give_up("task", f"rank 0: failure {number}")
            told.append("")
        else:
            peer = wire.size - wire.rank if wire.rank * 2 != wire.size else 0  # a live rank, or 0
            try:
                wire.receive(torch.zeros(1, dtype=torch.uint8), peer, 7).wait(timedelta(seconds=20))
            except RuntimeError:
                error = session().cause("for a test")
                told.append(f"{type(error).__name__}: {error}")
    told.append(str(ring(1)))
    return told


def lose_after_another() -> str:
    """Let rank 1 lose a group, and then rank 0, which waits for rank 2; return what that ends with."""
    store, rank = session().store, session().rank
    group = new_group("for a test", store, rank, 3)
    if rank == 1:
        lose(group, 1, 3)
        store.set("rank 1", "has lost it")
    if rank == 0:
        row = torch.zeros(1, dtype=torch.uint8)
        with contextlib.suppress(RuntimeError):  # when rank 1 closes the connection
            store.wait(["rank 1"])
            group.recv([row], 1, 7).wait(timedelta(seconds=20))
        work = group.recv([row], 2, 7)
        lose(group, 0, 3)
        try:
            work.wait(timedelta(seconds=20))
        except RuntimeError as error:
            store.set("rank 0", str(error))
    return str(store.get("rank 0"))


def hang_and_leave() -> str:
    """Let a rank hang, and then another one go; return what is told of a run."""
    here = session()
    here._hangs(1)
    here._gone(2)
    found = [str(here.cause("for a test"))]
    try:
        here.check()
    except asc.RankError as error:
        found.append(str(error))
    return " ".join(found)


def wait_for_the_last(folder: str) -> str:
    """Wait for a rank that is killed; return what is told."""
    wire = session().wire()
    Path(folder, str(wire.rank)).touch()
    if wire.rank == wire.size - 1:
        time.sleep(60)
    peer = wire.size - 1 if wire.rank == 0 else wire.rank - 1  # only rank 0 waits for it
    begun = time.monotonic()
    try:
        wire.receive(torch.zeros(1, dtype=torch.uint8), peer, 7).wait(timedelta(seconds=20))
    except RuntimeError:
        error = session().cause("for a test")
        return f"{time.monotonic() - begun < 20} {type(error).__name__}: {error}"
    return "nothing"


# ---- values


def odd_values() -> list[Any]:
    """Values of many kinds."""
    base = torch.arange(48.0).view(6, 8)
    return [
        base, base.t(), base[1:4, 2], base[:, ::2], base[0].expand(3, 8), base[:2, :1].expand(2, 5),
        torch.tensor(1.5), torch.zeros(0, 3), torch.tensor([True, False]), base.to(torch.bfloat16),
        torch.view_as_complex(base.view(6, 4, 2)).conj(), torch.nn.Parameter(base + 1),
        base.as_strided((3, 3), (1, 1)), base.flatten()[1:7],
        [base, {"a": (base.t(), 3), "b": None}], (1, "text", 2.5, True), base.to(torch.int16),
    ]  # fmt: skip


def pass_on_values() -> list[str]:
    """Send values from rank 0 to rank 1, and return how each differs there."""
    wire = session().wire()
    wrong = []
    for tag, value in enumerate(odd_values()):
        header = messages.header_of(value)
        if wire.rank == 0:
            for row in messages.rows(value):
                wire.send(row, 1, tag).wait()
            continue
        buffer = messages.ReceiveBuffer(messages.described(messages.header_row(header, "value")))
        for row in buffer.rows:
            wire.receive(row, 0, tag).wait()
        buffer.spread()
        same = addresses(buffer.value) == addresses(value) and equal(buffer.value, value)
        if messages.header_of(buffer.value) != header or not same:
            wrong.append(f"{value} became {buffer.value}")
    return wrong


def addresses(value: Any) -> list[int]:
    """Return where tensors begin in a line of the cache."""
    tensors = (leaf for leaf in flatten(value) if isinstance(leaf, torch.Tensor))
    return [tensor.data_ptr() % ALIGNMENT for tensor in tensors if tensor.numel()]


def equal(a: Any, b: Any) -> bool:
    """Whether two trees are the same, bit for bit."""
    if isinstance(a, torch.Tensor):
        return a.shape == b.shape and bool(torch.equal(a.detach(), b.detach()))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    return a == b and type(a) is type(b)


# ---- schedules


def run_drawn(
    graph: asc.Graph, policy: str, streams: int, outputs: Any, widths: Sequence[int]
) -> list[str]:
    """Run a drawn graph on all ranks; return what differs from the serial run, on this rank.

    ``widths`` are the columns of its inputs in each run.
    """
    machine = asc.Machine.cluster(cpu_streams=streams)
    try:
        schedule = asc.schedule(graph, machine, policy=policy, outputs=outputs)
    except asc.ScheduleError as error:
        return [f"refused: {error}"]
    wrong = []
    with schedule:
        here = {*machine.here}
        inputs = {name for name, device in schedule.program.inputs if device in here}
        for number, width in enumerate(widths):
            expected = serial_run(graph, width)
            given = wide_inputs(graph, width)
            torch.manual_seed(0)
            found = schedule(**{name: given[name] for name in schedule.inputs_here})
            own = {name for name, device in schedule.program.outputs if device in here}
            if found.keys() != own:
                wrong.append(f"run {number}: outputs {[*found]}")
            left = {**found, **{name: given[name] for name in given if name in inputs}}
            wrong += [
                f"run {number}: {name} is {item}, expected {expected[name]}\n{schedule}"
                for name, item in left.items()
                if not equal(item, expected[name])
            ]
    return wrong


def wide_inputs(graph: asc.Graph, width: int) -> dict[str, Any]:
    """Return fresh inputs with so many columns."""
    given = inputs_for(graph)
    return {name: item.repeat(1, 2)[:, :width].clone() for name, item in given.items()}


def run_drawn_in_flight(
    graph: asc.Graph, policy: str, streams: int, outputs: Any, in_flight: int, widths: Sequence[int]
) -> list[str]:
    """Run a drawn graph several times at once; return what differs from serial runs, on this rank.

    Some ranks wait for each run, and others submit as many as they may. Two runs in a row have the
    same inputs, which tasks may write; an output that shares their memory shows what the last wrote.
    """
    machine = asc.Machine.cluster(cpu_streams=streams)
    options: dict[str, Any] = {"policy": policy, "outputs": outputs, "in_flight": in_flight}
    try:
        schedule = asc.schedule(graph, machine, **options)
    except asc.ScheduleError as error:
        return [f"refused: {error}"]
    wrong = []
    with schedule:
        given = [wide_inputs(graph, width) for width in widths for _ in range(2)]
        twins = [{name: item.clone() for name, item in inputs.items()} for inputs in given]
        given = [given[number & ~1] for number in range(len(given))]
        torch.manual_seed(0)
        last = [graph.run_serial(**twins[number & ~1]) for number in range(len(given))]
        for number, inputs in enumerate(twins):
            inputs.update({name: given[number][name].clone() for name in inputs})
        torch.manual_seed(0)
        at_once = []
        for number in range(len(given)):
            found = graph.run_serial(**twins[number & ~1])
            at_once.append({name: item.clone() for name, item in found.items()})
        torch.manual_seed(0)
        runs = []
        for inputs in given:
            runs.append(schedule.submit(**{name: inputs[name] for name in schedule.inputs_here}))
            if machine.rank == len(graph.tasks) % 2:
                runs[-1].result()
        sources = [*(value.tensor for value in graph.sources if value.tensor is not None)]
        sources += [item for inputs in given for item in inputs.values()]
        shared = {item.untyped_storage().data_ptr() for item in sources}
        for number, results in enumerate([run.result() for run in runs]):  # when all have ended
            for name, item in results.items():
                is_shared = item.untyped_storage().data_ptr() in shared
                expected = (last if is_shared else at_once)[number][name]
                if not equal(item, expected):
                    wrong.append(f"run {number}: output {name!r} is {item}, not {expected}")
        here = {*machine.here}
        inputs = [name for name, device in schedule.program.inputs if device in here]
        for number in range(0, len(given), 2):
            wrong += [
                f"run {number}: input {name!r}"
                for name in inputs
                if name in given[number] and not equal(given[number][name], twins[number][name])
            ]
    return wrong


def fits(graph: asc.Graph, width: int) -> bool:
    """Whether a drawn graph, which may have constants of 3 columns, takes inputs with so many."""
    try:
        serial_run(graph, width)
    except RuntimeError:
        return False
    return True


def serial_run(graph: asc.Graph, width: int) -> dict[str, Any]:
    """Return the outputs of a serial run, and the inputs as it leaves them."""
    given = wide_inputs(graph, width)
    torch.manual_seed(0)
    return {**given, **graph.run_serial(**given)}


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


def fail_in_run(how: str, folder: str, heartbeat: float = 10.0) -> list[str]:
    """Let rank 1 fail in the third of five runs; return what each run ended with.

    With a short ``heartbeat``, no rank looks whether others are stopped.
    """
    if heartbeat < 10:
        session_module.is_stopped = lambda _: False
    runs = [0]

    def before(x: torch.Tensor) -> torch.Tensor:
        runs[0] += 1
        if runs[0] == 3:
            fail(how, Path(folder))
        return x + 1

    machine = asc.Machine.cluster(timeout=5, heartbeat=heartbeat)
    ended = []
    with asc.schedule(round_trip(before), machine) as schedule:
        for number in range(5):
            begun = time.monotonic()
            try:
                given = {name: torch.full((3,), number) for name in schedule.inputs_here}
                late = how == "hang" or (how == "hang alone" and machine.rank == 0)
                timeout = 0.3 if late and number == 2 else None
                found = schedule(**given, timeout=timeout)
                text = " ".join(str(item[0].item()) for item in found.values())
            except BaseException as error:
                text = f"{type(error).__name__}: {error}"
            ended.append(text)
            if time.monotonic() - begun > 4:
                ended[-1] += " (late)"
            if "gone" in text or "hangs" in text:
                break
    return ended


def fail_in_flight(how: str, folder: str) -> list[str]:
    """Let rank 1 fail in the sixth of twelve runs, some of them in flight; return how each ended.

    Each rank adds a number of its own for each run, so runs of different ranks do not mix unseen.
    """
    calls = [0]

    def second(x: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        if calls[0] == 6:
            fail(how, Path(folder))
        return x + own

    graph = asc.Graph("sum")
    x, y, z = graph.inputs("x", "y", "z")
    with graph.on("cpu:1"):
        found = graph.add(second, x, y, name="second")
    with graph.on("cpu:2"):
        found = graph.add(torch.add, found, z, name="third")
    machine = asc.Machine.cluster(timeout=5)
    graph.output(sum=found)
    homes = {"x": "cpu:0", "y": "cpu:1", "z": "cpu:2"}
    runs: list[Any] = []
    options: dict[str, Any] = {"inputs": homes, "outputs": "cpu:0", "in_flight": 3}
    with asc.schedule(graph, machine, **options) as schedule:
        own = 10**machine.rank  # type: ignore[operator]
        for number in range(12):
            given = {name: torch.full((3,), own * number) for name in schedule.inputs_here}
            late = how == "hang" and number == 5 and machine.rank == 1
            try:
                runs.append(schedule.submit(**given, timeout=0.3 if late else None))
            except asc.AutoschedError as error:
                runs.append(error)
        return [_ended(run) for run in runs]


def fail_behind() -> list[str]:
    """Let rank 1 fail in the third of six runs, when rank 0 is in the fourth; return how each ended."""
    calls = [0]

    def late(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        if calls[0] == 3:
            time.sleep(0.2)
            raise ValueError("of a test")
        return x + y

    graph = asc.Graph("behind")
    x, y = graph.inputs("x", "y")
    with graph.on("cpu:1"):
        graph.output(sum=graph.add(late, x, y))
    machine = asc.Machine.cluster(timeout=5)
    ended = []
    with asc.schedule(graph, machine, inputs={"x": "cpu:0", "y": "cpu:1"}) as schedule:
        own = 10**machine.rank  # type: ignore[operator]
        for number in range(6):
            given = {name: torch.full((3,), own * number) for name in schedule.inputs_here}
            ended.append(_ended(schedule.submit(**given)))
    return ended


def interleave() -> list[str]:
    """Run two schedules of one graph in turn; return what is wrong."""
    graph = asc.Graph("one of two")
    x, y = graph.inputs("x", "y")
    with graph.on("cpu:0"):
        a = x * 2
    with graph.on("cpu:1"):
        graph.output(z=a + y)
    machine = asc.Machine.cluster(timeout=5)
    make = partial(asc.schedule, graph, machine, inputs={"x": "cpu:0", "y": "cpu:1"})

    def given(schedule: Any, number: int) -> dict[str, torch.Tensor]:
        tensors = {"x": torch.full((3,), number), "y": torch.zeros(3, dtype=torch.int64)}
        return {name: tensors[name] for name in schedule.inputs_here}

    runs = []
    with make(in_flight=3) as one:
        runs.append(one.submit(**given(one, 0)))
        with make(in_flight=3) as other, make() as third:
            for number in range(1, 61):
                schedule = (one, other, third)[number % 3]
                if number % 7:
                    runs.append(schedule.submit(**given(schedule, number)))
                else:
                    runs.append(schedule(**given(schedule, number)))
            found = [run if isinstance(run, dict) else run.result(10) for run in runs]
    right = (str([2 * number] * 3) for number in range(61))
    outputs = (str(each["z"].tolist()) if each else "" for each in found)
    return [f"{a} {b}" for a, b in zip(outputs, right, strict=True) if a not in ("", b)]


def _ended(run: Any) -> str:
    """Return how a run ended: the number that it gives, or an error."""
    if isinstance(run, Exception):
        return f"{type(run).__name__}: {run}"
    try:
        return " ".join(str(item[0].item()) for item in run.result(timeout=10).values())
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def send_large(folder: str, in_flight: int) -> str:
    """Send so much that the test can end a process meanwhile; return the error."""
    runs = [0]
    last = 2 if in_flight == 1 else 5  # when the receiver is ready before the sender

    def first(x: torch.Tensor) -> torch.Tensor:
        runs[0] += 1
        if runs[0] == last:
            until(Path(folder, "send").exists)
        return x + 1

    def ready() -> int:
        runs[0] += 1
        if runs[0] == last:
            Path(folder, "ready").touch()
        return 0

    graph = asc.Graph("large")
    x = graph.input("x")
    with graph.on("cpu:0"):
        a = graph.add(first, x)
    with graph.on("cpu:1"):
        graph.output(ready=graph.add(ready), y=graph.add(torch.neg, a, name="second"))
    machine = asc.Machine.cluster(heartbeat=None)  # nobody looks whether others are stopped
    with asc.schedule(graph, machine, policy="single", in_flight=in_flight) as schedule:
        given = {name: torch.ones(1 << 24) for name in schedule.inputs_here}
        for _ in range(last - 1):
            schedule(**given)
        try:
            schedule(**given)
        except asc.RankError as error:
            return str(error)
    return "nothing"


def connections() -> list[int]:
    """Return for how many milliseconds each new connection waits for acknowledgements."""
    before = sockets()
    session()
    found = []
    for number, _ in sockets() - before:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
            connection.getpeername()
            found.append(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT))
    joined().meeting.agree("connections", "", "".join)  # a rank that leaves closes them
    return found


def connect(victim: int, group: str) -> str:
    """Connect to a rank that is killed before it connects in a group; return the error."""
    member = joined()
    member.meeting.timeout = 10

    def make(name: str, *rest: Any) -> Any:
        if member.rank == victim and name.startswith(group):
            os.kill(os.getpid(), signal.SIGKILL)
        return new_group(name, *rest)

    session_module.new_group = make
    wire_module.new_group = make
    try:
        return str(ring(1))
    except asc.RankError as error:
        return str(error)


def connect_late() -> str:
    """Connect; on rank 2 this ends after rank 0 has left."""

    class Late(session_module.Wire):
        def __init__(self, *args: Any):
            super().__init__(*args)
            until(lambda: 0 in members.absent)

    members = session()
    if members.rank == 2:
        with mock.patch.object(session_module, "Wire", Late):
            members.wire()
    members.wire()
    return members.named(0) if members.rank == 2 else ""


class _Users(weakref.WeakSet[Any]):
    """Users of a wire; another thread adds one while they are gone through."""

    def __iter__(self) -> Iterator[Any]:
        new = _User()
        for user in super().__iter__():
            thread = threading.Thread(target=session().tell_when_lost, args=(new,))
            thread.start()
            thread.join(0.05)
            yield user


class _User:
    """A user of a wire."""

    def where(self) -> str:
        return ""

    def lost(self) -> None:
        pass


def lose_meanwhile() -> list[bool]:
    """Lose a wire while another thread begins to use it; return whether the wire was closed."""
    members = session()
    wire = members.wire()
    user = _User()
    members._told = _Users([user])
    members.give_up("rank", "of a test")
    return [members.is_lost, wire.is_lost]


def join_alone(size: int) -> tuple[str, list[str]]:
    """Make torch's group; return its timeout, or the error if others miss, and threads that wait."""
    member = replace(joined(), size=size)
    places = {"RANK": "0", "WORLD_SIZE": str(size), "MASTER_ADDR": "nowhere", "MASTER_PORT": "1"}
    with (
        mock.patch.dict(os.environ, places),
        mock.patch.object(torch.distributed, "rendezvous", return_value=iter([(None, 0, 0)])),
        mock.patch.object(cluster_module, "join", return_value=member),
    ):
        try:
            cluster_module._join_by_torch(0.2)
        except asc.RankError as error:
            return str(error), [each.name for each in threading.enumerate() if each.name == "store"]
    found = torch.distributed.group.WORLD._get_backend(torch.device("cpu")).options._timeout
    torch.distributed.destroy_process_group()
    return str(found), []


def fail_to_connect(victim: int) -> list[str]:
    """Run again after one rank alone has failed to connect; return how each run ended."""
    member = joined()

    def make(name: str, *rest: Any) -> Any:
        made = new_group(name, *rest)
        if name == "wire 0 1":  # the last one of two ranks
            member.store.set(f"made/{member.rank}", "")
            if member.rank == victim:
                until(lambda: member.store.check([f"made/{1 - victim}"]))
                raise RuntimeError("of a test")
        return made

    graph = asc.Graph("one way")
    with graph.on("cpu:0"):
        a = graph.input("x") * 2
    with graph.on("cpu:1"):
        graph.output(y=a + 1)
    ended = []
    wire_module.new_group = make
    try:
        with asc.schedule(graph, asc.Machine.cluster()) as schedule:
            for number in range(3):
                given = {name: torch.full((2,), number) for name in schedule.inputs_here}
                try:
                    outputs = schedule(**given)
                    ended.append(" ".join(str(y[0].item()) for y in outputs.values()))
                except asc.RankError as error:
                    ended.append(str(error))
    finally:
        wire_module.new_group = new_group
    return ended


def end_after_sending() -> list[str]:
    """Let a task fail after another rank has ended its part; return what the ranks are told."""

    def second(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("of a test")

    graph = asc.Graph("one way")
    with graph.on("cpu:0"):
        a = graph.input("x") * 2
    with graph.on("cpu:1"):
        graph.output(y=graph.add(second, a))
    told = []
    with asc.schedule(graph, asc.Machine.cluster()) as schedule:
        try:
            schedule(**{name: torch.ones(2) for name in schedule.inputs_here})
        except asc.TaskError as error:
            told.append(str(error))
    until(lambda: session().is_lost)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        session().end()
    return told + [str(each.message) for each in found]


def run_on(folder: str) -> str:
    """Run until that fails; return the error."""
    with asc.schedule(round_trip(), machine := asc.Machine.cluster()) as schedule:
        while True:
            try:
                schedule(**{name: torch.ones(3) for name in schedule.inputs_here})
            except asc.RankError as error:
                return str(error)
            Path(folder, str(machine.rank)).touch()


def fail(how: str, folder: Path) -> None:
    """Fail in a task."""
    if how == "raise":
        raise ValueError("of a test")
    if how == "interrupt":
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)
        return
    if how.startswith("hang"):
        time.sleep(1)
        return
    if how == "busy":
        ctypes.PyDLL(None).usleep(1_300_000)  # with the lock of Python
        return
    if how == "stop":
        (folder / "here").touch()  # the test stops this process for a while
        until((folder / "go on").exists)
        return
    (folder / "here").touch()  # the test kills this process
    time.sleep(60)


def differ(what: str) -> str:
    """Make calls that differ on rank 1; return the error."""
    machine = asc.Machine.cluster(timeout=1 if what == "missing" else 5)
    graph = round_trip() if machine.rank != 1 or what != "graph" else asc.Graph("another")
    if what == "missing" and machine.rank == 1:
        return ""
    if what == "argument" and machine.rank == 1:
        graph = "no graph"  # type: ignore[assignment]
    try:
        if what == "call" and machine.rank == 1:
            asc.Machine.cluster()
        options = {"policy": "nonsense"} if what == "policy" else {}
        with asc.schedule(graph, machine, **options) as schedule:  # type: ignore[arg-type]
            if what == "input":
                schedule(**({} if machine.rank == 0 else {"x": 1}))
            if what == "structure":
                for x in (torch.ones(2), 1):
                    schedule(x=x)
    except asc.AutoschedError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def vary_shapes() -> list[str]:
    """Pass values of several shapes from rank to rank and back; return which runs are wrong."""
    graph = asc.Graph("varying")
    x, y = graph.inputs("x", "y")
    pair = graph.add(lambda x, y: [x.t() + 0, {"y": y + 0}], x, y, on="cpu:0")
    half = graph.add(lambda pair: (pair[0] * 2)[::2], pair, on="cpu:1")
    total = graph.add(lambda pair, half: pair[1]["y"].sum() + half.sum(), pair, half, on="cpu:2")
    x.add_(1)
    with graph.on("cpu:0"):
        graph.output(total=total + 1, half=half * 1, x=x)
    wrong = []
    kept: list[Any] = []
    with asc.schedule(graph, asc.Machine.cluster(), outputs="cpu:0") as schedule:
        sizes = ((2, 1), (2, 1), (3, 1), (3, 1), (0, 2), (0, 2), (4, 0), (1, 5), (4, 2), (2, 1))
        for number, (n, k) in enumerate(sizes):
            dtype = torch.float64 if number % 3 else torch.float32
            given = {"x": torch.arange(4.0 * n).view(4, n), "y": torch.arange(k, dtype=dtype)}
            copies = {name: item.clone() for name, item in given.items()}
            expected = {**graph.run_serial(**copies)}
            found = schedule(**{name: given[name] for name in schedule.inputs_here})
            kept.append((found, expected))
    for number, (found, expected) in enumerate(kept):
        wrong += [
            f"run {number}: {name}" for name in found if not equal(found[name], expected[name])
        ]
    return wrong


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


def measure() -> tuple[str, str]:
    """Measure a cluster that seems to have two hosts; return its JSON, and that of one with one.

    The rate that is found is the number of sizes with times, since a busy machine has any.
    """
    ranks_module.SIZES = (1 << 10, 1 << 16, 1 << 20)
    ranks_module.fitted = lambda seconds: (1e9 * len([*filter(None, seconds.values())]), 1e-5)
    machine = asc.Machine.cluster()
    assert machine.rank is not None
    devices = [replace(device, host=f"host {device.rank == 2}") for device in machine.devices]
    apart = replace(machine, devices=tuple(devices))
    found = [asc.measure_machine(each, repeat=2).to_json() for each in (apart, machine)]
    return found[0], found[1]


def profile(late: float, count: int) -> Any:
    """Profile runs of a graph; the clock of rank 1 is late, and rank 0 profiles ``count`` runs."""
    machine = asc.Machine.cluster()
    clock = time.perf_counter
    if machine.rank == 1:
        time.perf_counter = lambda: clock() - late
    try:
        with asc.schedule(round_trip(), machine) as schedule:
            given = {name: torch.ones(1000) for name in schedule.inputs_here}
            repeat = count if machine.rank == 0 else 2
            found = schedule.profile(**given, repeat=repeat, warmup=1)
            expected = [
                (span.kind, span.name, span.streams, span.instruction)
                for span in schedule.simulate().spans
            ]
            trace = asc.viz.perfetto_json(schedule.simulate(), measured=found)
            page = schedule.page(found)
            costs = found.costs()
        return replace(found, learn=None, runs=()), len(found.runs), expected, trace, page, costs
    except asc.AutoschedError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        time.perf_counter = clock


def fork() -> list[Any]:
    """Fork after a run; the child has joined nothing, and the wire stays whole."""
    found: list[Any] = [ring(1)]
    machine = asc.Machine.cluster()
    child = os.fork()
    if not child:
        os._exit(0 if machine.rank is None else 1)
    found.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    return [*found, ring(1)]
