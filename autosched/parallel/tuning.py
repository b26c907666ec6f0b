"""Choose stages, schedule and number of micro-batches of a pipeline by simulation.

Two captured sizes give the costs of each operator for any number of rows. So alternatives are
simulated without capturing them; only the best is captured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch

from autosched import Costs, ScheduleError
from autosched.parallel.batches import batch_homes, shares
from autosched.parallel.buckets import buckets
from autosched.parallel.costs import LinearCosts, tabulated
from autosched.parallel.division import divided
from autosched.parallel.micro_batch import MicroBatch, micro_batch_of
from autosched.parallel.pipeline_schedules import ORDERS, Kind, Order, stage_devices, zero_bubble
from autosched.parallel.planned import Planned
from autosched.parallel.rewrite import checkpointed, split_convolutions
from autosched.parallel.stages import Cuts, balanced, by_map
from autosched.parallel.step_spec import StepSpec
from autosched.parallel.template import Template, accumulating
from autosched.parallel.training import Reduction, Training
from autosched.parallel.tuning_curve import Curve, Tried, candidates
from autosched.parallel.updates import Bucket

__all__ = ["SERIAL", "Planner", "Split"]

SERIAL = "serial"  # one micro-batch after another
Split = Literal["auto"] | Mapping[str, str]
_SUM = Reduction("sum", ())
_TOO_LONG = 1.2  # times the best: more micro-batches only take longer
_Pair = tuple[MicroBatch, MicroBatch]  # the first micro-batch, and further ones


@dataclass(frozen=True)
class Planner:
    """Plans the steps of a pipeline."""

    training: Training
    split: Split
    chunks: int | Literal["auto"]
    order: str
    checkpoint: bool = False
    replicas: int = 1
    reduction: Reduction = _SUM

    def __post_init__(self) -> None:
        if self.replicas > 1 and not isinstance(self.split, str):
            raise ScheduleError(
                "split= names the devices of one pipeline; with replicas= give split='auto' and "
                "devices="
            )

    @cached_property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """The devices of each replica, in the order of stages."""
        devices = self.training.devices
        if not isinstance(self.split, str):
            devices = tuple(dict.fromkeys(self.split.values()))
        n = len(devices) // self.replicas
        return tuple(devices[i * n : (i + 1) * n] for i in range(self.replicas))

    def study(self, batch: Sequence[Any], rows: int) -> _Study:
        """Return the captures and simulations of a batch."""
        return _Study(self, batch, rows)

    def plan(self, batch: Sequence[Any], counts: Sequence[int]) -> Planned:
        """Choose an order and a number of micro-batches, and plan that."""
        study = self.study(batch, counts[0])
        return study.planned(study.curve(None if self.chunks == "auto" else [self.chunks]))


class _Variant(NamedTuple):
    """A model cut for an order: its stages, and micro-batches with costs for any number of rows."""

    cuts: Cuts
    micro_batches: _Pair
    costs: LinearCosts


class _Study:
    """The captures and simulations for one kind of batch."""

    def __init__(self, planner: Planner, batch: Sequence[Any], rows: int):
        self.planner = planner
        self.training = planner.training
        self.machine = planner.training.machine
        self.batch = batch
        self.rows = rows
        self.shares = divided(rows, [1] * planner.replicas)  # rows of each replica
        self.passes: dict[int, Template] = {}
        self.variants: dict[tuple[tuple[str, ...], bool], _Variant] = {}
        # Bytes that the optimizer adds, by parameter.
        self.new_state: dict[str, float] | None = None

    def curve(self, chunks: Sequence[int] | None) -> Curve:
        """Simulate each order with each possible number of micro-batches."""
        most = self.shares[0]
        numbers = candidates(most) if chunks is None else [min(number, most) for number in chunks]
        sizes = [size for number in numbers for size in shares(most, number)]
        # Batch norms refuse one row, so the smaller of the two captures has more if possible.
        pair = (min(max(2, min(sizes)), max(sizes)), max(sizes))
        tried = list[Tried]()
        errors = list[ScheduleError]()
        for order in self._orders(pair):
            best = math.inf
            for number in numbers:
                try:
                    tried.append(self._tried(order, number, pair))
                except ScheduleError as error:  # such as random numbers in another order
                    errors.append(error)
                    break
                best = min(best, tried[-1].seconds)
                if chunks is None and tried[-1].seconds > _TOO_LONG * best:
                    break
        if not tried:
            raise errors[0]
        if not any(one.fits for one in tried):
            least = min(one.nbytes for one in tried)
            hint = "" if self.planner.checkpoint else ", or checkpoint=True"
            raise ScheduleError(
                f"no way fits into the memory of the devices: at least {least / 1e9:.3g} GB are "
                f"needed on one; use more devices{hint}"
            )
        return Curve(most, tuple(tried))

    def planned(self, curve: Curve) -> Planned:
        best = curve.best
        rows = tuple(shares(own, best.chunks) for own in self.shares)
        sizes = list(dict.fromkeys(size for own in rows for size in own))
        variant = self._variant(best.order, (min(sizes), max(sizes)))
        made = {size: self._micro_batches(size, variant, best.order) for size in sizes}
        first = made[sizes[0]][0]
        buckets = self._buckets(first)
        updates = self.training.updates(buckets, self.planner.replicas > 1)
        spec = self._spec(best.order, rows, made, variant)
        spec = replace(spec, buckets=buckets, updates=updates)
        reduction = self._reduction(spec)
        schedule, built = self.training.scheduled(replace(spec, reduction=reduction))
        notes = {"curve": curve, "order": best.order, "chunks": best.chunks, "cuts": variant.cuts}
        notes["reduction"] = reduction
        settings = tuple(update.settings for update in updates)
        return Planned(schedule, built, first.template, updates[0].state, notes, settings)

    def _reduction(self, spec: StepSpec) -> str:
        """Return the reduction that is fastest after the last micro-batch of each replica."""
        reduction = self.planner.reduction
        names = reduction.strategies(len(spec.devices), bool(self.machine.ranks))
        if len(names) == 1:
            return names[0]
        last = replace(spec, rows=tuple(own[-1:] for own in spec.rows), order=None)
        plans = self.training.alone.reduced(last, reduction)
        return min(plans, key=lambda name: plans[name][0].makespan)

    def _buckets(self, one: MicroBatch) -> tuple[Bucket, ...]:
        """Return the parameters of each stage, in buckets for several replicas."""
        examples = one.template.examples
        stages: dict[int, list[str]] = {}
        for name in one.template.gradients:
            stages.setdefault(one.input_stages[name], []).append(name)
        found: list[Bucket] = []
        for stage, own in stages.items():
            groups: Sequence[Sequence[str]] = [own]
            if self.planner.replicas > 1:
                ready = [(name, examples[name].nbytes, examples[name].dtype) for name in own]
                groups = buckets(ready, self.planner.reduction.sizes)
            found += [Bucket(stage, {n: examples[n] for n in names}) for names in groups]
        return tuple(found)

    # ---- variants: a model cut for an order

    def _orders(self, pair: tuple[int, int]) -> list[str]:
        """Return the orders to try: those that are possible for the stages of ``split=``."""
        wanted = self.planner.order
        if isinstance(self.planner.split, str):
            return [wanted] if wanted != "auto" else list(ORDERS)
        devices = self._variant(SERIAL, pair).cuts.devices
        fitting = [name for name in ORDERS if self._layout(name) == devices]
        if wanted == "auto" and fitting:
            return fitting
        if wanted in (*fitting, SERIAL):
            return [wanted]
        known = f"; {', '.join(map(repr, fitting))} can run them" if fitting else ""
        raise ScheduleError(
            f"schedule {wanted!r} cannot run the stages of split=, on {', '.join(devices)} in "
            f"turn{known}"
        )

    def _layout(self, order: str) -> tuple[str, ...]:
        devices = self.planner.groups[0]
        if order == SERIAL:
            return devices
        return tuple(devices[rank] for rank in stage_devices(ORDERS[order](len(devices), 1)))

    def _pass(self, size: int) -> Template:
        if size not in self.passes:
            self.passes.update(self.training.passes(self.batch, [size], self.rows))
        return self.passes[size]

    def _variant(self, order: str, pair: tuple[int, int]) -> _Variant:
        key = self._layout(order), order == "zero-bubble"
        if key not in self.variants:
            cuts = self._cuts(key[0], pair)
            large, micro_batches = self._merged(pair[1], cuts, order)
            small = large if pair[0] == pair[1] else self._rewritten(pair[0], cuts, order)[2]
            self.variants[key] = _Variant(cuts, micro_batches, LinearCosts(small, large, pair))
        return self.variants[key]

    def _cuts(self, layout: tuple[str, ...], pair: tuple[int, int]) -> Cuts:
        large = self._pass(pair[1])
        costs = _estimated(large)
        split = self.planner.split
        if not isinstance(split, str):
            return by_map(large.graph, costs, self.machine, split)
        least = costs  # activations of the smallest micro-batch, if memory is limited
        if pair[0] != pair[1] and self._is_limited:
            least = _estimated(self._pass(pair[0]))
        state = self._state_nbytes(large)
        return balanced(large.graph, costs, self.machine, layout, state, least)

    def _rewritten(
        self, size: int, cuts: Cuts, order: str
    ) -> tuple[tuple[Template, Template], Mapping[str, int], Costs]:
        """Return templates of the first and further micro-batches, stages of tasks, and costs."""
        one = self._pass(size)
        stage: Mapping[str, int] = cuts.stages(one.graph)
        if order == "zero-bubble":
            one, stage = split_convolutions(one, stage)
        if self.planner.checkpoint:
            one, stage = checkpointed(one, stage)
        more = accumulating(one)
        return (one, more), stage, _estimated(more)

    def _merged(self, size: int, cuts: Cuts, order: str) -> tuple[Costs, _Pair]:
        """Capture micro-batches of a size; return their costs, and the merged graphs."""
        templates, stage, costs = self._rewritten(size, cuts, order)
        first, more = (
            micro_batch_of(
                template, stage, costs, self.machine, split_backward=order == "zero-bubble",
                branching=self.planner.order == SERIAL,
            )
            for template in templates
        )  # fmt: skip
        return costs, (first, more)

    def _micro_batches(self, size: int, variant: _Variant, order: str) -> _Pair:
        if size == variant.costs.rows[1]:
            return variant.micro_batches
        return self._merged(size, variant.cuts, order)[1]

    # ---- memory

    @property
    def _is_limited(self) -> bool:
        return any(not math.isinf(device.nbytes) for device in self.machine.devices)

    def _state_nbytes(self, one: Template) -> dict[str, float]:
        """Return the bytes of each tensor of the model, its gradient and the optimizer's state."""
        moments = self._moments(one)
        examples = one.examples
        nbytes = {n: float(examples[n].nbytes) for n in one.state.tensors() if n in examples}
        for name in one.gradients:
            nbytes[name] = 2.0 * examples[name].nbytes + moments.get(name, 0.0)
        return nbytes

    def _moments(self, one: Template) -> dict[str, float]:
        """Return the bytes of the optimizer's state, by parameter.

        Where memory is limited, those after a step.
        """
        names = {id(tensor): name for name, tensor in one.state.parameters.items()}
        now: dict[str, float] = {}
        for parameter, state in self.training.optimizer.state.items():
            if id(parameter) in names and state:
                tensors = (item for item in state.values() if isinstance(item, torch.Tensor))
                now[names[id(parameter)]] = float(sum(tensor.nbytes for tensor in tensors))
        if self._is_limited and any(name not in now for name in one.gradients):
            if self.new_state is None:
                self.new_state = self._new_state(one)
            now = self.new_state | now
        return now

    def _new_state(self, one: Template) -> dict[str, float]:
        """Return the bytes of state that the optimizer creates in its next step, by parameter."""
        found: dict[str, float] = {}
        everything = Bucket(0, {name: one.examples[name] for name in one.gradients})
        for update in self.training.updates([everything], flat=False):
            for output, nbytes in update.new_state.items():
                kind, *path = update.places[output]
                if kind == "moment":
                    found[path[1]] = found.get(path[1], 0.0) + nbytes
        return found

    # ---- steps

    def _tried(self, order: str, chunks: int, pair: tuple[int, int]) -> Tried:
        """Simulate a step without a limit of memory."""
        variant = self._variant(order, pair)
        sizes = shares(self.shares[0], chunks)
        made = {size: self._scaled(variant, size) for size in dict.fromkeys(sizes)}
        alone = self.training.alone
        unlimited = tuple(replace(device, nbytes=math.inf) for device in alone.machine.devices)
        training = replace(alone, machine=replace(alone.machine, devices=unlimited))
        schedule, _ = training.scheduled(self._spec(order, (sizes,), made, variant))
        timeline = schedule.simulate()
        devices = dict.fromkeys(variant.cuts.devices)
        runs = (span for span in timeline.spans if span.kind == "run")
        busy = sum(span.seconds for span in runs if span.streams[0].device in devices)
        idle = 1 - busy / (len(devices) * timeline.makespan) if timeline.makespan else 0.0
        peak: dict[str, float] = {device: schedule.peak_bytes[device] for device in devices}
        first = variant.micro_batches[0]
        for name, nbytes in self._moments(first.template).items():
            peak[variant.cuts.devices[first.input_stages.get(name, 0)]] += nbytes
        fits = all(peak[device] <= self.machine.device(device).nbytes for device in devices)
        return Tried(order, chunks, timeline.makespan, idle, max(peak.values()), fits)

    def _scaled(self, variant: _Variant, size: int) -> _Pair:
        costs = variant.costs.at(size)
        first, more = variant.micro_batches
        pairs = [(one, *tabulated(one.graph, costs, self.machine)) for one in (first, more)]
        first, more = (replace(one, seconds=s, nbytes=nbytes) for one, s, nbytes in pairs)
        return first, more

    def _spec(
        self,
        order: str,
        rows: tuple[tuple[int, ...], ...],
        made: Mapping[int, _Pair],
        variant: _Variant,
    ) -> StepSpec:
        """Return the step of as many replicas as ``rows`` has, without updates."""
        first = {size: pair[0] for size, pair in made.items()}
        more = {size: pair[1] for size, pair in made.items()}
        cuts = variant.cuts
        distinct = list(dict.fromkeys(cuts.devices))
        ranks = [distinct.index(device) for device in cuts.devices]
        others = self.planner.groups[1 : len(rows)]
        devices = (cuts.devices, *(tuple(group[rank] for rank in ranks) for group in others))
        actions = self._order(order, max(map(len, rows)), next(iter(first.values())), cuts)
        homes = batch_homes(variant.micro_batches[0].template, self.batch)
        return StepSpec(
            "pipeline", self.machine, devices, rows, first, more, (), (), actions, homes
        )

    def _order(self, order: str, chunks: int, one: MicroBatch, cuts: Cuts) -> Order | None:
        devices = cuts.devices
        count = len(dict.fromkeys(devices))
        if order == SERIAL:
            return None
        if order != "zero-bubble":
            return ORDERS[order](count, chunks)
        kinds: tuple[Kind, ...] = ("F", "I", "W")
        seconds: dict[Kind, list[float]] = {kind: [0.0] * len(cuts) for kind in kinds}
        for task, role in one.roles.items():
            kind: Kind = role.kind if role.kind != "R" else "F"
            seconds[kind][role.stage] += one.seconds[task][devices[role.stage]]
        links = zip(devices, devices[1:], cuts.nbytes, strict=False)
        copies = [self.machine.copy_seconds(a, b, nbytes) for a, b, nbytes in links]
        return zero_bubble(count, chunks, seconds=seconds, copy=max(copies, default=0.0))


def _estimated(one: Template) -> Costs:
    return Costs.estimate(one.graph, one.examples)
