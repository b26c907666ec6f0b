"""Run a program's generated code instead of its steps.

Used where a backend adds nothing to the calls and one thread suffices. Python executes the
generated code faster than a loop over steps. The code that is shown to the user is the code that
runs, except that functions whose source text it contains are called as the user's own objects.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autosched.codegen import Code
from autosched.runtime.threads.tapes import Fault

__all__ = ["Inline"]


class Inline:
    """Loaded code; it is called with the inputs of a graph by name.

    >>> import autosched as asc
    >>> graph = asc.Graph()
    >>> graph.output(y=graph.input("x") * 2)
    >>> Inline(asc.schedule(graph, asc.Machine([asc.Device("cpu")])).code)({"x": 21})
    {'y': 42}
    """

    def __init__(self, code: Code):
        module: dict[str, Any] = {"__name__": "autosched.generated"}
        exec(compile(code, "<code of an autosched schedule>", "exec"), module)
        module.update(code.means)
        self._step = module["step"].__wrapped__  # its caller has switched autograd off
        self._inputs = tuple(code.inputs)
        self._given = dict(code.given)
        self._calls = code.calls

    def __call__(self, inputs: Mapping[str, Any]) -> Any:
        """Run once; return the outputs by name."""
        return self._step(*[inputs[name] for name in self._inputs], **self._given)

    def fault(self, error: BaseException) -> tuple[Fault, list[Any]] | None:
        """Return the call that raised, and its arguments.

        None if there is none. Drops everything else that the step held.
        """
        trace = error.__traceback__
        while trace is not None:
            frame = trace.tb_frame
            if frame.f_code is self._step.__code__:
                position, names = self._calls.get(trace.tb_lineno, (-1, ()))
                arguments = [frame.f_locals[name] for name in names if name in frame.f_locals]
                frame.clear()
                return (Fault(position, error), arguments) if position >= 0 else None
            trace = trace.tb_next
        return None
