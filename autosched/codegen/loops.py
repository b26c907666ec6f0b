"""Write the functions of a loop that keep several runs in flight.

``loop`` issues run after run. It waits for the oldest one only when as many are in flight as the
program says, and releases what that run left in memory. Knows no task.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autosched.codegen.pieces import Piece, bracketed, laid_out
from autosched.codegen.step import Globals

__all__ = ["LOOP_HELPERS", "loop_parts", "swaps"]

LOOP_HELPERS = "begin collections end issue lock loop".split()

_IN_FLIGHT = '''
lock = threading.Lock()


def loop(batches, **given):
    """Run once for each batch of inputs, a tuple or a dict; yield the outputs, in order.

    Up to {count} runs are in flight: one begins when the {count}th before it has ended.
    """
    runs = collections.deque()
    try:
        for batch in batches:
            runs.append(begin(batch, given))
            if len(runs) == {count}:
                yield end(*runs.popleft())
        while runs:
            yield end(*runs.popleft())
    finally:
        for stream in streams:
            stream.synchronize()


def begin(batch, given):
    """Issue a run, to begin after the earlier work of the caller's streams; return what ``end`` takes.

    One thread issues at a time, because a stream knows only one stream to go back to after ``with``.
    """
    with lock:
        for stream in streams:
            stream.wait_stream(current_stream(stream.device))
        inputs, named = ((), batch) if isinstance(batch, dict) else (batch, {})
        outputs, left = issue(*inputs, **named, **given)
        ends = [Event(stream.device) for stream in streams]
        for event, stream in zip(ends, streams, strict=True):
            event.record(stream)
    return outputs, left, ends


def end(outputs, left, ends):
    """Wait until a run has ended, and then release what it left in memory; return its outputs.

    The memory of outputs is not reused before the caller's streams have finished with it.
    """
    for event in ends:
        event.synchronize()
    left.clear()
    for output in outputs.values():
        if isinstance(output, torch.Tensor) and output.device.type != "cpu":
            output.record_stream(current_stream(output.device))
    return outputs
'''

_ONE_BY_ONE = '''
def loop(batches, **given):
    """Run once for each batch of inputs, a tuple or a dict; yield the outputs, in order.

    One run follows the other, because one thread does all the work.
    """
    for batch in batches:
        yield step(**batch, **given) if isinstance(batch, dict) else step(*batch, **given)
'''


def loop_parts(
    module: Globals, in_flight: int, inputs: Sequence[str], given: Sequence[str]
) -> Iterator[str]:
    """Yield the definitions of a loop that precede its last function.

    ``inputs`` and ``given`` are the parameters of ``step``. The last function is ``issue``; without
    streams it is ``step`` itself.
    """
    if not module.streams:
        yield _ONE_BY_ONE
        return
    yield _IN_FLIGHT.replace("{count}th", _ordinal(in_flight)).replace("{count}", str(in_flight))
    names = [Piece("*"), *map(Piece, given)] if given else []
    head = laid_out(bracketed("def step", "()", [*map(Piece, inputs), *names]), 0, 1)
    batch = ", ".join(inputs) + ("," if len(inputs) == 1 else "")
    passed = [Piece(f"[({batch})]"), *(Piece(f"{name}={name}") for name in given)]
    call = laid_out(bracketed("(only,) = loop", "()", passed), 4)
    yield (
        f'{head}:\n    """Run once; return the outputs by name."""\n    {call}\n    return only\n'
    )


def swaps(module: Globals) -> Iterator[str]:
    """Yield lines that make the events of the last run those of the run before."""
    for event, earlier in module.earlier.items():
        name = module.events[event]
        yield f"    global {name}, {earlier}"
        yield f"    {name}, {earlier} = {earlier}, {name}"


def _ordinal(number: int) -> str:
    words = {2: "second", 3: "third"}
    return words.get(number, f"{number}th")
