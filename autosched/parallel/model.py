"""Model parallelism: a model whose parts are on several devices.

For models that do not fit on one device. One batch goes through one stage after another. What needs
nothing from other stages, such as a second tower, does not wait for them; otherwise one device
works at a time. ``pipeline`` lets the stages work concurrently.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, overload

import torch

from autosched import Costs, Graph, Machine, Schedule, ScheduleError, Value
from autosched.parallel.batches import batch_homes, batch_inputs, first_rows, key_of, rows_of
from autosched.parallel.micro_batch import micro_batch_of
from autosched.parallel.pipelined import SERIAL, Pipeline, Split
from autosched.parallel.plans import Key, Plans, move_model, move_state, scheduled, torch_device
from autosched.parallel.ranks import (
    Layout,
    agreement_of,
    described,
    generators_of,
    label_on,
    same_rows,
)
from autosched.parallel.stages import Cuts, balanced, by_map
from autosched.parallel.step import done, results
from autosched.parallel.step_graph import input_on
from autosched.parallel.template import Loss, Template, forward_of
from autosched.parallel.training import Training, check_options, devices_of


@overload
def model_parallel(
    model: torch.nn.Module, machine: Machine | None = None, *, loss_fn: None = None, **options: Any
) -> Forward: ...


@overload
def model_parallel(
    model: torch.nn.Module, machine: Machine | None = None, *, loss_fn: Loss, **options: Any
) -> Pipeline: ...


def model_parallel(
    model: torch.nn.Module,
    machine: Machine | None = None,
    *,
    devices: Sequence[str] | None = None,
    split: Split = "auto",
    loss_fn: Loss | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    **options: Any,
) -> Forward | Pipeline:
    """Return the model as stages on several devices, or a training step of it.

    Without ``loss_fn`` and ``optimizer``, it is the forward alone. On a machine of several ranks,
    all then pass the same batches; each stage is that of the model of its rank, and the result is
    on the rank of the last stage, and None on the others: ``outputs="cpu:0"`` chooses a device.

    ``split`` is ``"auto"``, one stage per device, cut so that they take equally long and fit; or
    the devices of modules by patterns of their names, ``{"layer1": "cuda:0", "layer2.*":
    "cuda:1"}``, which also match the modules inside: the first match counts, and a module that no
    pattern matches joins the one that runs before it. ``options`` are those of ``data_parallel``,
    and for a training step ``averages``, ``clip_grad_norm`` and ``before_step`` of ``pipeline``.
    Raises ScheduleError for an impossible split.

    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> machine, split = Machine.emulated(gpus=2), {"0": "cuda:0", "2": "cuda:1"}
    >>> run = model_parallel(model, machine, split=split, backend="host")
    >>> print(run.cuts(torch.ones(3, 4)))
    stage  device  blocks    time  sent on
    0      cuda:0  0 ... 1  10 us     96 B
    1      cuda:1  2         5 us        -
    >>> torch.equal(run(torch.ones(3, 4)), model(torch.ones(3, 4)))
    True
    """
    if (loss_fn is None) != (optimizer is None):
        raise ScheduleError(
            "a training step needs both loss_fn= and optimizer=; without both, it is forward alone"
        )
    if loss_fn is None:
        return Forward(model, machine, devices, split, options)
    names = ("averages", "clip_grad_norm", "before_step")
    of_step = {name: options.pop(name) for name in names if name in options}
    trained = (model, loss_fn, optimizer)
    training = Training.of("model_parallel", trained, machine, devices, options, **of_step)
    return Pipeline(training, split, 1, SERIAL)


@dataclass(frozen=True)
class _Planned:
    schedule: Schedule
    template: Template
    cuts: Cuts
    written: Collection[str]  # the state that tasks write in place

    def inputs(self, batch: Sequence[Any]) -> dict[str, torch.Tensor]:
        inputs = {**self.template.state.tensors(), **batch_inputs(self.template, batch)}
        return {name: inputs[name] for name in self.schedule.inputs_here}

    def finish(self, outputs: Mapping[str, Any]) -> Any:
        """Return what the model returns; None in place of what other ranks have.

        This rank's model gets what the stages of others wrote.
        """
        rank = self.schedule.machine.rank
        if rank is not None:
            state = self.template.state.tensors()
            with torch.no_grad():
                for name in self.written:
                    if (made := outputs.get(_written_on(rank, name))) is not None:
                        state[name].copy_(made)
        labels = {name: name for name in self.template.graph.outputs}
        labels.update((name, label_on(rank, name)) for name in self.template.places)
        return self.template.finish({name: outputs.get(label) for name, label in labels.items()})


class Forward(Plans[_Planned]):
    """The forward of a model on several devices, without gradients.

    Closed by ``close()``, by a ``with`` statement, or by garbage collection.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        machine: Machine | None,
        devices: Sequence[str] | None,
        split: Split,
        options: Mapping[str, Any],
    ):
        super().__init__()
        check_options("model_parallel", options)
        self.model = model
        self.machine = Machine.local() if machine is None else machine
        self.devices = devices_of(self.machine, devices)
        self.split = split
        self.options = options
        self._agreement = agreement_of("model_parallel", self.machine, options)
        self._last: _Planned | None = None

    def __call__(self, *batch: Any) -> Any:
        """Return what the model returns; of several ranks, on that of the last stage.

        The others get None. All ranks pass the same batch.
        """
        with self._guard:
            planned = self._after_others(batch)
            try:
                outputs = planned.schedule.run_with(planned.inputs(batch), is_agreed=True)
            except BaseException as error:
                if self._agreement is not None:
                    self._agreement.give_up(error)
                raise
            return planned.finish(outputs)

    def submit(self, *batch: Any) -> Future[Any]:
        """Start a call, and return the future of its result immediately.

        At most ``in_flight`` calls are under way, an option that is 1 by default: ``submit`` waits
        until there is room. Calls for which there is another plan begin when those before have
        ended. Do not write to the batch or the model before. Over several ranks a call ends before
        this returns.
        """
        if self._agreement is not None:
            return done(self, batch)
        with self._guard:
            planned = self._after_others(batch)
            return planned.schedule.submit_for(planned.inputs(batch), planned.finish)

    def map(self, batches: Iterable[Sequence[Any]]) -> Iterator[Any]:
        """Yield the results of calls with each batch of an iterable, in order.

        A thread fetches batches ahead. With the option ``in_flight``, so many calls are under way,
        or have results that were not yielded.
        """
        return results(self.submit, self, batches, self.options.get("in_flight", 1))

    def wait(self, timeout: float | None = None) -> None:
        """Wait until all submitted calls have ended.

        Raises RunTimeoutError if that takes more than ``timeout`` seconds.
        """
        if self._last is not None:
            self._last.schedule.wait(timeout)

    def schedule(self, *batch: Any) -> Schedule:
        """Return the schedule of calls like this one.

        On several ranks it is made by all, unless there was such a call before.
        """
        with self._guard:
            return self._of(batch).schedule

    def cuts(self, *batch: Any) -> Cuts:
        """Return the stages: what they hold, on which device, and how long each takes.

        On several ranks they are found by all, unless there was such a call before.
        """
        with self._guard:
            return self._of(batch).cuts

    def _of(self, batch: Sequence[Any]) -> _Planned:
        """Return the plan of such a call, for inspection."""
        found = self._plans.get((None, self._key(batch)))
        return self._agreed(batch) if found is None else found

    def _after_others(self, batch: Sequence[Any]) -> _Planned:
        """Return the plan of a call, after all calls with another one."""
        planned = self._agreed(batch)
        if planned is not self._last:
            self.wait()
            self._last = planned
        return planned

    def _agreed(self, batch: Sequence[Any]) -> _Planned:
        """Return the plan of a call, a new one if necessary, on which all ranks agree."""
        agreement = self._agreement
        if agreement is None:
            return self._new(batch, self._key(batch), lambda: self._planned(batch))
        agreed = agreement.step(
            batch,
            lambda: self._key(batch),
            lambda _: described(batch, self.model),
            lambda: False,
            self,
        )
        assert agreed is not None  # nothing is shared that could have changed
        same_rows(agreed.counts)
        plan = partial(agreement.together, "to plan", lambda: self._planned(batch))
        return self._new(batch, agreed.key, plan)

    def _new(self, batch: Sequence[Any], key: Hashable, plan: Callable[[], _Planned]) -> _Planned:
        if (None, key) not in self._plans:
            self.wait()
        return self._cached((None, key), plan)

    def _key(self, batch: Sequence[Any]) -> Key:
        return Key((key_of(batch), self._watched(self.model)))

    def _planned(self, batch: Sequence[Any]) -> _Planned:
        # 1. Capture the forward, and cut it into stages.
        here = {*self.machine.here}
        first = next(name for name in self.devices if name in here)
        device = torch_device(self.machine, first)
        move_model(self.model, None, device)
        template = forward_of(self.model, first_rows(batch, rows_of(batch), device))
        costs = Costs.estimate(template.graph, template.examples)
        if isinstance(self.split, str):
            sizes = {name: float(t.nbytes) for name, t in template.state.tensors().items()}
            cuts = balanced(template.graph, costs, self.machine, self.devices, sizes)
        else:
            cuts = by_map(template.graph, costs, self.machine, self.split)
        stages = cuts.stages(template.graph)
        part = micro_batch_of(template, stages, costs, self.machine, branching=True)
        layout = Layout(self.machine, (self.devices,))
        # 2. Build the graph, with the tasks and the state of each stage on its device.
        graph = Graph("model parallel", generators=generators_of(self.machine))
        homes = batch_homes(template, batch)
        values = {}
        for name, stage in part.input_stages.items():
            home: str | None = cuts.devices[stage]
            if name in template.batch:
                home = layout.batch_home(cuts.devices[stage], homes.get(name))
            values[name] = input_on(graph, home, name, part.nbytes[name])
        on = {name: cuts.devices[role.stage] for name, role in part.roles.items()}
        outputs = graph.include(part.graph, values, on=on, seconds=part.seconds, nbytes=part.nbytes)
        graph.output(**outputs)
        state = {name: value for name, value in values.items() if name not in template.batch}
        written = {n: value for n, value in state.items() if graph.last_version(value.index)}
        options = dict(self.options)
        if self.machine.ranks:
            options["outputs"] = self._wanted(graph, outputs, written, template.places, cuts)
        # 3. Schedule it.
        of_state = {name: value.home for name, value in state.items() if value.home in here}
        move_state(self.machine, template.state, of_state)
        made = scheduled(graph, self.machine, {}, options)
        return _Planned(made, template, cuts, frozenset(written))

    def _wanted(
        self,
        graph: Graph,
        made: Mapping[str, Value],
        written: Mapping[str, Value],
        places: Collection[str],
        cuts: Cuts,
    ) -> dict[str, str]:
        """Return the devices of outputs over several ranks, each of which gets new state.

        Results are on the device of the last stage, unless the user says otherwise.
        """
        given = self.options.get("outputs", cuts.devices[-1])
        results = [name for name in made if name not in places]
        wanted = dict.fromkeys(results, given) if isinstance(given, str) else dict(given)
        layout = Layout(self.machine, (self.devices,))
        for rank in layout.ranks:
            for name in places:
                label = label_on(rank, name)
                if rank:
                    graph.output(**{label: made[name]})
                wanted[label] = layout.first_device(rank)
            for name, value in written.items():
                if value.home is not None and layout.rank(value.home) != rank:
                    label = _written_on(rank, name)
                    graph.output(**{label: value})
                    wanted[label] = layout.first_device(rank)
        return wanted


def _written_on(rank: int | None, name: str) -> str:
    """Return the name of a rank's output that is what a stage of another rank wrote."""
    return f"{label_on(rank, name)}.written"
