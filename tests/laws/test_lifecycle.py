"""Law: whatever happens to a run, in whatever order, its state is that of the table, and it ends once."""

from __future__ import annotations

import threading

from hypothesis import given
from hypothesis import strategies as st

from autosched.codegen.threads import Emitted
from autosched.runtime.threads import runs
from autosched.runtime.threads.runs import TABLE, Event, Fault, Loop, Run, drawing

THREADS = ("a", "b", "c")
WHATS = ("started", "returned", "raised", "interrupted", "stopped", "let go")
happenings = st.lists(st.tuples(st.sampled_from(WHATS), st.sampled_from(THREADS)), max_size=20)


class Happening:
    """A run whose threads do what they are told: their functions raise what is put into ``todo``."""

    def __init__(self) -> None:
        self.todo: list[BaseException] = []
        self.ends: list[str] = []
        emitted = Emitted()
        self.lock = emitted.lock()
        for name in THREADS:
            emitted.add(name, 0, self._act)
        emitted.load()
        self.run = Run(
            1, emitted, emitted.locks, Loop(False), lambda run: self.ends.append(run.state)
        )

    def _act(self) -> None:
        if self.todo:
            raise self.todo.pop()

    def does(self, what: str, thread: str) -> Event | None:
        """Let something happen to the run; return the event that the table knows, if it is one."""
        run = self.run
        if what == "started":
            run.enter()
        elif what == "returned":
            run.leave(thread)
            return "all left" if len(run.left) == len(THREADS) else None
        elif what == "stopped":
            run.stop()
        elif what == "let go":
            run.let_go()
        else:
            error = ValueError() if what == "raised" else KeyboardInterrupt()
            self.todo.append(error)
            run.stop(Fault(0, self.todo.pop())) if run.aborted else run.execute(thread)
        return what  # type: ignore[return-value]


@given(happenings)
def test_any_sequence_of_events_follows_the_table(sequence: list[tuple[str, str]]) -> None:
    happening, state = Happening(), "queued"
    run = happening.run
    faults: list[str] = []
    first: Event | None = None
    for what, thread in sequence:
        if thread in run.left and what in ("started", "raised", "interrupted"):
            continue  # a thread that has left a run does nothing in it
        event = happening.does(what, thread)
        if event is not None:
            if first is None and TABLE[state].get(event) == "aborting":  # type: ignore[index]
                first = event
            if event in ("raised", "interrupted") and state != "ended":
                faults.append(event)
            state = TABLE[state].get(event, state)  # type: ignore[index, assignment]
        assert run.state == state
        assert bool(run.aborted) == (first is not None)
        assert happening.lock.locked() == (first is None)  # whoever waits is released
    # The first fault, unless an interrupt came behind it; none behind a run that was stopped.
    expected = None if first in (None, "stopped") else faults[0]
    if expected is not None and "interrupted" in faults:
        expected = "interrupted"
    kinds = {ValueError: "raised", KeyboardInterrupt: "interrupted"}
    assert (None if run.fault is None else kinds[type(run.fault.error)]) == expected
    assert happening.ends == (["ended"] if state == "ended" else [])


def test_each_state_is_reached_and_can_end() -> None:
    reached = {"queued"}
    for changes in TABLE.values():
        reached |= {*changes.values()}
    assert reached == {*TABLE}
    assert all("all left" in changes for state, changes in TABLE.items() if state != "ended")


def test_the_drawing_at_the_head_of_the_module_is_that_of_the_table() -> None:
    text = runs.__doc__
    assert text is not None
    assert "\n".join(f"    {line}" for line in drawing().splitlines()) in text


def test_the_last_of_threads_that_leave_at_once_ends_a_run_and_no_other() -> None:
    for _ in range(50):
        happening = Happening()
        threads = [threading.Thread(target=happening.run.leave, args=(name,)) for name in THREADS]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert happening.ends == ["ended"]
