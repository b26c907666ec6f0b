"""Compare inference on a CPU with ONNX Runtime, on the networks of fused.py, with two threads.

Each contestant of a case runs in a process of its own, since the threads of ONNX Runtime spin while
they wait. Processes take turns, and each turn has the median of calls for some time after as much
time to settle. Before, each compares its result with that of eager mode: the largest difference,
relative to the largest element, must be at most 1e-3.

The network is exported by ``torch.onnx.export``. ``freezing`` is an option of Inductor that makes
constants of weights; regions of autosched take them as arguments, or as constants by ``Frozen``.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from itertools import chain, islice
from multiprocessing.connection import Connection
from typing import Any

import torch
from _report import parser, publish, table
from fused import branched, by_autosched, by_torch, difference, in_eager, networks
from torch import Tensor, nn

THREADS = 2
MOST = 1e-3  # of the difference from eager results

Run = Callable[[], Any]


def by_freezing(model: nn.Module, inputs: dict[str, Tensor]) -> tuple[Run, Any]:
    torch._inductor.config.freezing = True
    return by_torch(model, inputs)


def by_onnx_runtime(model: nn.Module, inputs: dict[str, Tensor]) -> tuple[Run, Any]:
    import onnxruntime

    class Plain(nn.Module):
        """Returns tensors alone."""

        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, *values: Tensor) -> Any:
            made = self.model(**dict(zip(inputs, values, strict=True)))
            return tuple(made.values()) if isinstance(made, dict) else made

    names = [*inputs]
    program = torch.onnx.export(
        Plain().eval(), tuple(inputs.values()), input_names=names, dynamo=True, verbose=False
    )
    assert program is not None
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = THREADS
    session = onnxruntime.InferenceSession(
        program.model_proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    given = {name: tensor.numpy() for name, tensor in inputs.items()}
    return lambda: [torch.from_numpy(item) for item in session.run(None, given)], dict


CONTESTANTS: dict[str, Callable[[nn.Module, dict[str, Tensor]], tuple[Run, Any]]] = {
    "eager": in_eager,
    "torch.compile": by_torch,
    "torch.compile, freezing": by_freezing,
    "ONNX Runtime": by_onnx_runtime,
    "autosched, fused, 1 stream": lambda model, inputs: by_autosched(model, inputs, 1, True),
    "autosched, fused, 2 streams": lambda model, inputs: by_autosched(model, inputs, 2, True),
    "autosched, frozen, 1 stream": lambda model, inputs: by_autosched(model, inputs, 1, True, True),
    "autosched, frozen, 2 streams": lambda model, inputs: by_autosched(
        model, inputs, 2, True, True
    ),
}


def cases() -> Iterator[tuple[str, nn.Module, dict[str, Tensor]]]:
    """Yield all networks, each once."""
    torch.manual_seed(0)
    seen = set()
    for label, model, inputs in chain(networks(), branched()):
        if label not in seen:
            seen.add(label)
            yield label, model.eval(), inputs


def tensors(made: Any) -> dict[str, Tensor]:
    leaves = torch.utils._pytree.tree_leaves(dict(made) if hasattr(made, "items") else made)
    return {str(i): leaf for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}


def serve(pipe: Connection, label: str, name: str, turn: float) -> None:
    """Prepare a contestant, send how its result differs, then seconds of a call for each request."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(THREADS)
    model, inputs = next((m, i) for known, m, i in cases() if known == label)
    with torch.no_grad():
        run, _ = CONTESTANTS[name](model, inputs)
        pipe.send(difference(tensors(run()), tensors(model(**inputs))))
        while pipe.recv():
            taken: list[float] = []
            begun = time.perf_counter()
            while not taken or time.perf_counter() < begun + 2 * turn:
                now = time.perf_counter()
                run()
                if now > begun + turn:
                    taken.append(time.perf_counter() - now)
            pipe.send(statistics.median(taken))


def measured(label: str, rounds: int, turn: float) -> tuple[dict[str, float], dict[str, float]]:
    """Return, by contestant, the median seconds of a call, and the difference from eager results."""
    spawning = multiprocessing.get_context("spawn")
    pipes: dict[str, Connection] = {}
    seconds: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    processes = []
    for name in CONTESTANTS:
        pipes[name], theirs = spawning.Pipe()
        processes.append(spawning.Process(target=serve, args=(theirs, label, name, turn)))
        processes[-1].start()
        theirs.close()
    try:
        differences = {name: pipe.recv() for name, pipe in pipes.items()}
        if any(found > MOST for found in differences.values()):
            raise AssertionError(f"results differ from eager ones: {differences}")
        for _ in range(rounds):
            for name, pipe in pipes.items():
                pipe.send(True)
                seconds[name].append(pipe.recv())
    finally:
        for pipe, process in zip(pipes.values(), processes, strict=True):
            with contextlib.suppress(OSError):  # it has ended
                pipe.send(False)
            process.join(5)
            process.kill()
    return {name: statistics.median(taken) for name, taken in seconds.items()}, differences


def main() -> None:
    chosen = parser(__doc__).parse_args()
    rounds, turn, most = (2, 0.2, 2) if chosen.quick else (9, 1.0, None)
    rows = []
    for label in islice([label for label, _, _ in cases()], most):
        seconds, differences = measured(label, rounds, turn)
        ours = min(taken for name, taken in seconds.items() if name.startswith("autosched"))
        rows.append(
            [
                label,
                *(f"{taken * 1e6:,.0f}" for taken in seconds.values()),
                f"{ours / seconds['ONNX Runtime']:.2f}",
                f"{max(differences.values()):.0e}",
            ]
        )
    heads = ["us", *CONTESTANTS, "best of autosched / ONNX Runtime", "largest difference"]
    packages = ["torch", "onnxruntime"]
    publish("onnx_runtime", "ONNX Runtime", [table(heads, rows)], chosen, packages)


if __name__ == "__main__":
    main()
