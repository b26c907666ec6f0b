"""The situations that torch's own CUDA sanitizer is tested with, and those that it documents as missed.

Programs are lists of words: ``1w`` writes on stream 1, ``2r`` reads on it, ``1>2`` lets stream 2 wait
for stream 1, ``1e`` records event e on stream 1, ``e2`` lets stream 2 wait for e, ``e`` synchronises
e, ``1s`` stream 1, and ``s`` the device. Stream 0 is the default stream.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

from autosched.sanitizer import sanitize, watching


def run(words: str, x: torch.Tensor | None = None) -> list[str]:
    with watching() as watched:
        streams = [torch.cuda.default_stream(), *(torch.cuda.Stream() for _ in range(4))]
        events: dict[str, Any] = {}
        x = torch.zeros(4, device="cuda")
        torch.cuda.synchronize()
        for word in words.split():
            if word == "s":
                torch.cuda.synchronize()
            elif ">" in word:
                streams[int(word[2])].wait_stream(streams[int(word[0])])
            elif word[-1] == "s":
                streams[int(word[0])].synchronize()
            elif word[0].isdigit():
                with torch.cuda.stream(streams[int(word[0])]):
                    if word[1] == "w":
                        x.fill_(1)
                    elif word[1] == "r":
                        x + 1
                    else:
                        events.setdefault(word[1], torch.cuda.Event()).record()
            elif len(word) == 2:
                events.setdefault(word[0], torch.cuda.Event()).wait(streams[int(word[1])])
            else:
                events[word].synchronize()
        torch.cuda.synchronize()
    return [finding.kind for finding in watched.report.findings]


@pytest.mark.parametrize(
    ("words", "found"),
    {
        "1r 2r": [],
        "1w 2w": ["race"],
        "1w 1a a2 2w": [],
        "1w 2r": ["race"],
        "1r 2w": ["race"],
        # reads in between do not hide the last write
        "1w 1a a2 2r 3r": ["race"],
        "1w 1>2 1>3 2r 3r": [],
        # branches that meet, and chains
        "1w 1>2 1>3 2r 3r 2>4 3>4 4w": [],
        "1w 1>2 1>3 2r 3r 2>4 4w": ["race"],
        "1w 1>2 2r 2>3 3>4 4w": [],
        # a record before the write orders nothing
        "1a 1w a2 2w": ["event"],
        "a2 1w 1a 2w": ["race"],
        "1w a2 1a 2w": ["event"],
        # all readers must have been waited for
        "1w 1>2 1>3 1>4 2r 3r 2>1 1w": ["race"],
        "1w 1>2 1>3 2r 3r 2>1 3>1 1w": [],
        "1w 1a 2a a3 3w": ["race"],
        "1w 1a 2a 1>2 2b b3 3w": [],
        # a second record is what later waits wait for, and earlier waits keep theirs
        "1w 1a a2 1w 1a 2r": ["race"],
        "1w 1a 1w 1a a2 2r": [],
        "1w 1a a2 a3 2r 3r": [],
        # the host
        "1w s 2w": [],
        "1w s 1w 2w": ["race"],
        "1w 1s 2w": [],
        "1w 2s 2w": ["race"],
        "1w 1a a 2w": [],
        "1w 1a 1w a 2w": ["race"],
        "1w 0w": ["race"],  # streams of the pool do not wait for the default stream
        "e1 1w": ["event"],  # never recorded
    }.items(),
)
def test_words(words: str, found: list[str]) -> None:
    kinds = run(words)
    assert sorted(set(kinds)) == found


def on(side: torch.cuda.Stream, work: Callable[[], Any]) -> Any:
    with torch.cuda.stream(side):
        return work()


def kinds(program: Callable[[], Any], **options: Any) -> list[str]:
    return [finding.kind for finding in sanitize(program, **options).findings]


def parts(second: Callable[[torch.Tensor], torch.Tensor], joins: bool = True) -> Callable[[], Any]:
    """Write the left part of a tensor on one stream, and another part on a second one."""

    def program() -> None:
        x, a, b = torch.zeros(6, 8, device="cuda"), torch.cuda.Stream(), torch.cuda.Stream()
        torch.cuda.synchronize()
        on(a, lambda: x[:, :4].fill_(1))
        on(b, lambda: second(x).fill_(2))
        torch.cuda.synchronize()

    return program


def test_views_race_by_the_bytes_that_they_share() -> None:
    assert not kinds(parts(lambda x: x[:, 4:]))
    assert not kinds(parts(lambda x: x.t()[4:]))
    assert not kinds(parts(lambda x: x[1::2, 5::2]))
    assert kinds(parts(lambda x: x[:, 3:])) == ["race"]
    assert kinds(parts(lambda x: x.view(-1)[9:11])) == ["race"]
    assert not kinds(parts(lambda x: x.view(-1)[4:8]))
    assert kinds(parts(lambda x: x.as_strided((2,), (24,), 0))) == ["race"]


def test_a_copy_between_gpus_is_a_barrier_of_their_current_streams_and_no_others() -> None:
    def program(reader: int) -> torch.Tensor:
        streams = [torch.cuda.Stream("cuda:1") for _ in range(2)]
        x = torch.ones(4, device="cuda:0")
        y = on(streams[0], lambda: x.to("cuda:1"))
        z = on(streams[reader], lambda: y + 1)
        torch.cuda.synchronize("cuda:1")
        return z

    assert not kinds(lambda: program(0), gpus=2)
    assert set(kinds(lambda: program(1), gpus=2)) >= {"race"}


def test_default_streams_of_two_gpus_are_two() -> None:
    def program() -> None:
        x = torch.ones(4, device="cuda:0")
        y = torch.ones(4, device="cuda:1")
        torch.cuda.default_stream("cuda:0").synchronize()
        on(torch.cuda.default_stream("cuda:1"), lambda: y + 1)
        with torch.cuda.device(1):
            x + 1  # on the default stream of its own GPU

    assert not kinds(program, gpus=2)


def test_new_memory_is_not_written_elsewhere_without_waiting_for_its_stream() -> None:
    def program(waits: bool) -> None:
        side = torch.cuda.Stream()
        x = torch.ones(4, device="cuda")
        x.mul_(2)
        del x
        y = torch.empty(4, device="cuda")
        if waits:
            side.wait_stream(torch.cuda.current_stream())
        on(side, lambda: y.fill_(1))
        torch.cuda.synchronize()

    assert kinds(lambda: program(False)) == ["lifetime"]
    assert not kinds(lambda: program(True))


def test_garbage_that_is_collected_while_a_step_is_taken_is_freed_after_it() -> None:
    depths = [0]
    with watching() as watched:
        take = watched.detector.order.take

        def collecting(step: Any) -> None:
            depths.append(depths[-1] + 1)
            gc.collect()
            take(step)
            depths.append(depths[-1] - 1)

        watched.detector.order.take = collecting  # type: ignore[method-assign]
        x: Any = torch.ones(4, device="cuda")
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        on(side, lambda: x + 1)
        circle: list[Any] = [x]
        circle.append(circle)
        x = circle = []
        for _ in range(2):
            torch.zeros(4, device="cuda")
        torch.cuda.synchronize()
    assert max(depths) == 1
    assert [finding.kind for finding in watched.report.findings] == ["lifetime"]


def test_streams_of_the_pool_that_are_one_are_reported() -> None:
    def program(count: int) -> None:
        streams = [torch.cuda.Stream() for _ in range(count)]
        for stream in streams:
            on(stream, lambda: torch.ones(2, device="cuda"))

    assert not kinds(lambda: program(32))
    assert kinds(lambda: program(33)) == ["stream"]


def test_numbers_that_are_read_are_zero_and_said_to_be() -> None:
    def program() -> float:
        return torch.ones(3, device="cuda").sum().item()

    report = sanitize(program)
    assert report.result == 0
    assert "numbers=True" in report.notes[0]
    assert sanitize(program, numbers=True).result == 3
    with pytest.raises(NotImplementedError, match="depends on numbers"):
        sanitize(lambda: torch.ones(3, device="cuda").nonzero())
    assert not kinds(lambda: torch.ones(3, device="cuda").nonzero(), numbers=True)


def test_an_error_of_the_function_is_its_own() -> None:
    def program() -> None:
        raise RuntimeError("own")

    with pytest.raises(RuntimeError, match="own"):
        sanitize(program)
    assert torch.cuda.device_count() == 0


def test_advice_is_what_can_be_left_out() -> None:
    def program() -> torch.Tensor:
        side = torch.cuda.Stream()
        x = torch.ones(3, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        side.wait_stream(torch.cuda.current_stream())
        y = on(side, lambda: x + 1)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        return y

    report = sanitize(program)
    assert not report.findings
    text = [str(item) for item in report.advice]
    first = program.__code__.co_firstlineno
    numbers = [item.lines[0].number - first for item in report.advice]
    assert numbers == [3, 4, 6, 7], text  # any one of them


def test_a_report_says_what_is_missing_where() -> None:
    def program() -> torch.Tensor:
        side, x = torch.cuda.Stream(), torch.ones(3, device="cuda")
        with torch.cuda.stream(side):
            y = x + 1
        torch.cuda.current_stream().wait_stream(side)
        return y

    (finding,) = sanitize(program).findings
    first = program.__code__.co_firstlineno
    assert (finding.kind, finding.tensor) == ("race", "x")
    assert finding.first is not None
    assert finding.second is not None
    assert [each.lines[0].number - first for each in (finding.first, finding.second)] == [1, 3]
    assert "side.wait_stream(torch.cuda.default_stream(0))" in finding.fix
    assert str(first + 3) in str(finding)


def test_what_graphs_do_not_permit_and_what_they_keep() -> None:
    def program(keeps: bool) -> torch.Tensor:
        x, y = torch.ones(3, device="cuda"), torch.zeros(3, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            torch.mul(x, 2, out=y)
        if not keeps:
            del x
        graph.replay()
        return y

    assert kinds(lambda: program(False)) == ["graph"]
    assert not kinds(lambda: program(True))

    def captured(work: Callable[[torch.Tensor], object]) -> Callable[[], None]:
        def program() -> None:
            x = torch.ones(3, device="cuda")
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                work(x)

        return program

    assert kinds(captured(lambda x: x.sum().item())) == ["graph"]
    assert kinds(captured(lambda x: torch.cuda.synchronize())) == ["graph"]
    assert kinds(captured(lambda x: on(torch.cuda.Stream(), lambda: x + 1))) == ["graph"]


def test_branches_of_a_graph_race_in_each_replay() -> None:
    def program(joins: bool) -> None:
        x, y = torch.ones(3, device="cuda"), torch.ones(3, device="cuda")
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.graph(graph):
            own = torch.cuda.current_stream()
            side.wait_stream(own)
            on(side, lambda: x.add_(1))
            if joins:
                own.wait_stream(side)
            y.copy_(x)
            own.wait_stream(side)
        for _ in range(2):
            graph.replay()

    assert kinds(lambda: program(False)) == ["graph"]
    assert not kinds(lambda: program(True))


def test_a_graph_does_not_overlap_itself_but_its_user_may() -> None:
    def program(used: bool) -> None:
        x = torch.ones(3, device="cuda")
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.graph(graph):
            own = torch.cuda.current_stream()
            x.add_(1)
            side.wait_stream(own)
            on(side, lambda: x.mul_(2))
            own.wait_stream(side)
        side.wait_stream(torch.cuda.current_stream())
        graph.replay()
        on(side, graph.replay)  # waits for the first replay, as CUDA has it
        if used:
            x.mul_(2)
        torch.cuda.synchronize()

    assert not kinds(lambda: program(False))
    assert kinds(lambda: program(True)) == ["graph"]
