"""The emulated machine is as treacherous as CUDA: what a program does not order goes wrong in some interleaving.

Each program stands here as it should be; a test leaves out a wait, and sees every outcome that this
makes possible.
"""

from __future__ import annotations

import pytest
import torch

import autosched as asc
from tests.interleavings import explore

MACHINE = asc.Machine.emulated(gpus=1)
X = torch.tensor([1.0, 2.0])


def outcomes(text: str, graph: asc.Graph, what: str) -> set[str]:
    """What an output or input is after the interleavings of a program; the name of the error where a task raises."""
    runs = explore(asc.Program.parse(text), graph, MACHINE, examples={"x": X})
    return {type(run.error).__name__ if run.error else str(run.left[what].tolist()) for run in runs}


def without(line: str, text: str) -> str:
    before, found, after = text.partition(line + "\n")
    assert found, line
    return before + after


def two_readers() -> asc.Graph:
    graph = asc.Graph()
    y = graph.add(torch.mul, graph.input("x"), 10, name="y")
    graph.output(graph.add(torch.add, y, 1, name="there"), graph.add(torch.sub, y, 1, name="here"))
    return graph


TWO_READERS = """\
input x on cpu
cuda:0/copy-in   copy x <- cpu
cuda:0/copy-in   record e0
cuda:0/compute   wait e0
cuda:0/compute   run y
cuda:0/compute   record e1
cuda:0/compute1  wait e1
cuda:0/compute1  run there
cuda:0/compute1  record e2
cuda:0/copy-out  wait e1
cuda:0/copy-out  copy y -> cpu
cuda:0/copy-out  record e3
cuda:0/copy-in   wait e1
cuda:0/copy-in   free x
cpu/compute      wait e3
cpu/compute      run here
cpu/compute      free y
cuda:0/compute   wait e3
cuda:0/compute   wait e2
cuda:0/compute   free y
output there on cuda:0
output here on cpu
"""


def test_what_is_ordered_has_one_outcome() -> None:
    asc.verify(asc.Program.parse(TWO_READERS), two_readers())
    assert outcomes(TWO_READERS, two_readers(), "output 'here'") == {"[9.0, 19.0]"}
    assert outcomes(TWO_READERS, two_readers(), "output 'there'") == {"[11.0, 21.0]"}


def test_the_host_reads_nothing_before_the_copy_to_it_is_complete() -> None:
    racy = without("cpu/compute      wait e3", TWO_READERS)
    assert outcomes(racy, two_readers(), "output 'here'") == {"[9.0, 19.0]", "TaskError"}


def test_a_task_reads_nothing_before_the_copy_of_its_argument_is_complete() -> None:
    racy = without("cuda:0/compute   wait e0", TWO_READERS)
    assert outcomes(racy, two_readers(), "output 'here'") == {"[9.0, 19.0]", "TaskError"}


def test_a_block_may_go_while_another_stream_has_yet_to_read_it() -> None:
    racy = without("cuda:0/compute   wait e2", TWO_READERS)
    with pytest.raises(asc.ProgramError, match="is freed while task 'there' may still use it"):
        asc.verify(asc.Program.parse(racy), two_readers())
    assert outcomes(racy, two_readers(), "output 'there'") == {"[11.0, 21.0]", "TaskError"}


def test_a_freed_block_is_overwritten_at_once_in_the_order_of_the_stream_that_frees_it() -> None:
    kept: list[torch.Tensor] = []  # what no schedule knows of: a reference of the user's

    def keeping(x: torch.Tensor) -> torch.Tensor:
        kept[:] = [x * 10]
        return kept[0]

    graph = asc.Graph()
    y = graph.add(keeping, graph.input("x"), name="y")
    before = graph.add(lambda y: y.clone(), y, name="before")
    graph.output(before, graph.add(lambda after: kept[0].clone(), before, name="after"))
    text = "input x on cpu\ncpu/a run y\ncpu/a run before\ncpu/a free y\ncpu/a run after\noutput before on cpu\n"
    program = text + "output after on cpu\n"
    asc.verify(asc.Program.parse(program), graph)
    assert outcomes(program, graph, "output 'before'") == {"[10.0, 20.0]"}
    assert outcomes(program, graph, "output 'after'") == {"[nan, nan]"}


def test_views_of_a_freed_block_are_overwritten_with_it() -> None:
    kept: list[torch.Tensor] = []

    def rest(y: torch.Tensor) -> torch.Tensor:
        kept[:] = [y[1:]]
        return kept[0]

    graph = asc.Graph()
    y = graph.add(torch.mul, graph.input("x"), 10, name="y")
    view = graph.add(rest, y, aliases=y, name="view")
    total = graph.add(torch.sum, view, name="total")
    graph.output(graph.add(lambda total: kept[0].clone(), total, name="after"))
    text = (
        "input x on cpu\ncpu/a run y\ncpu/a run view\ncpu/a run total\n"
        "cpu/a free y\ncpu/a run after\ncpu/a free total"
    )
    assert outcomes(text + "\noutput after on cpu", graph, "output 'after'") == {"[nan]"}


COPY_THEN_WRITE = """\
input x on cpu
cuda:0/copy-in   copy x <- cpu
cuda:0/copy-in   record e0
cuda:0/compute   wait e0
cuda:0/compute   run y
cuda:0/compute   record e1
cuda:0/copy-out  wait e1
cuda:0/copy-out  copy y -> cpu
cuda:0/copy-out  record e2
cuda:0/compute   wait e2
cuda:0/compute   run mul
cpu/compute      wait e2
cpu/compute      run here
cpu/compute      free y
cuda:0/copy-in   wait e1
cuda:0/copy-in   free x
output y on cuda:0
output here on cpu
"""


def test_a_copy_reads_its_source_when_it_runs_not_when_it_is_issued() -> None:
    graph = asc.Graph()
    y = graph.add(torch.mul, graph.input("x"), 10, name="y")
    here = graph.add(torch.neg, y, name="here")
    y.mul_(3)
    graph.output(y, here)
    asc.verify(asc.Program.parse(COPY_THEN_WRITE), graph)
    assert outcomes(COPY_THEN_WRITE, graph, "output 'here'") == {"[-10.0, -20.0]"}
    racy = without("cuda:0/compute   wait e2", COPY_THEN_WRITE)
    assert outcomes(racy, graph, "output 'here'") == {"[-10.0, -20.0]", "[-30.0, -60.0]"}
    assert outcomes(racy, graph, "output 'y'") == {"[30.0, 60.0]"}


WRITTEN_BACK = """\
input x on cpu
cuda:0/copy-in   copy x <- cpu
cuda:0/copy-in   record e0
cpu/compute      run before
cpu/compute      record e1
cuda:0/compute   wait e0
cuda:0/compute   run mul
cuda:0/compute   record e2
cuda:0/copy-out  wait e2
cuda:0/copy-out  wait e1
cuda:0/copy-out  copy x@1 -> cpu overwriting
cuda:0/copy-out  record e3
cuda:0/copy-in   wait e3
cuda:0/copy-in   free x@1
output before on cpu
"""


def test_what_is_copied_back_overwrites_the_tensor_of_the_caller_under_its_readers() -> None:
    graph = asc.Graph()
    x = graph.input("x")
    graph.output(graph.add(torch.neg, x, name="before"))
    x.mul_(3)
    asc.verify(asc.Program.parse(WRITTEN_BACK), graph)
    assert outcomes(WRITTEN_BACK, graph, "output 'before'") == {"[-1.0, -2.0]"}
    racy = without("cuda:0/copy-out  wait e1", WRITTEN_BACK)
    assert outcomes(racy, graph, "output 'before'") == {"[-1.0, -2.0]", "[-3.0, -6.0]"}
    assert outcomes(racy, graph, "input 'x'") == {"[3.0, 6.0]"}
