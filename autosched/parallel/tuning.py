"""Choose cuts, order and number of micro-batches of a pipeline by simulation.

Two captured sizes give a line for the work of each operator, and so the costs for any number of
rows. So alternatives are simulated without capturing them; only the best is captured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch

from autosched import Costs, ScheduleError
from autosched.parallel.buckets import buckets
from autosched.parallel.micro_batch import Pieces, costs_of, pieces_of
from autosched.parallel.pipeline_schedules import ORDERS, Kind, Order, stage_devices, zero_bubble
from autosched.parallel.rewrite import checkpointed, halved
from autosched.parallel.scaling import Scaling
from autosched.parallel.stages import Cuts, balanced, by_map
from autosched.parallel.step import Planned, rows_of
from autosched.parallel.step_graph import Grid
from autosched.parallel.template import Template, accumulating
from autosched.parallel.training import Sums, Trained, batch_homes, shares
from autosched.parallel.tuning_curve import Curve, Tried, candidates
from autosched.parallel.updates import Bucket

__all__ = ["SERIAL", "Planner", "Split"]

Split = Literal["auto"] | Mapping[str, str]


class Planner:
    """Plans the steps of a pipeline.

    ``groups`` are the devices of each replica, in the order of stages.
    """

    def __init__(
        self,
        trained: Trained,
        devices: tuple[str, ...],
        split: Split,
        chunks: int | Literal["auto"],
        order: str,
        checkpoint: bool,
        replicas: int,
        sums: Sums,
    ):
        self.trained = trained
        self.split = split
        self.chunks = chunks
        self.order = order
        self.checkpoint = checkpoint
        self.replicas = replicas
        self.sums = sums
        given = devices if isinstance(split, str) else tuple(dict.fromkeys(split.values()))
        each = len(given) // replicas
        self.groups = tuple(given[i * each : (i + 1) * each] for i in range(replicas))
        if replicas > 1 and not isinstance(split, str):
            raise ScheduleError(
                "split= names the devices of one pipeline; with replicas= give split='auto' and devices="
            )

    def study(self, batch: Sequence[Any], rows: int | None = None) -> _Study:
        """Return the study of a batch."""
        return _Study(self, batch, rows_of(batch) if rows is None else rows)

    @property
    def used(self) -> tuple[str, ...]:
        """The devices of the first replica."""
        return self.groups[0]

    def plan(self, batch: Sequence[Any], rows: int) -> Planned:
        """Choose an order and a number of micro-batches, and plan that."""
        study = self.study(batch, rows)
        curve = study.curve(None if self.chunks == "auto" else [self.chunks])
        return study.planned(curve)


class _Variant(NamedTuple):
    """A model cut for an order: its stages, and the first and further micro-batches, for any number of rows."""

    cuts: Cuts
    first: Pieces
    more: Pieces
    scaling: Scaling


_Staged = tuple[Template, Mapping[str, int]]  # with the stages of tasks


def _costs(staged: _Staged) -> Costs:
    return Costs.estimate(staged[0].graph, staged[0].examples)


class _Study:
    """The captures and simulations for one kind of batch."""

    def __init__(self, planner: Planner, batch: Sequence[Any], rows: int):
        self.planner = planner
        self.trained = planner.trained
        self.batch = batch
        self.rows = rows
        self.own = shares(rows, planner.replicas)  # rows of each replica
        self.machine = planner.trained.machine
        self.passes: dict[int, Template] = {}
        self.variants: dict[tuple[tuple[str, ...], bool], _Variant] = {}
        self.begun: dict[str, float] | None = (
            None  # by parameter, bytes of the optimizer's future state
        )

    def curve(self, chunks: Sequence[int] | None) -> Curve:
        """Simulate each order with each possible number of micro-batches."""
        most = self.own[0]
        numbers = candidates(most) if chunks is None else [min(number, most) for number in chunks]
        sizes = [size for number in numbers for size in shares(most, number)]
        pair = (
            min(max(2, min(sizes)), max(sizes)),
            max(sizes),
        )  # batch norms cannot do with one row
        tried = list[Tried]()
        refused = list[ScheduleError]()
        for order in self._orders(pair):
            best = math.inf
            for number in numbers:
                try:
                    tried.append(self._tried(order, number, pair))
                except (
                    ScheduleError
                ) as error:  # such as random numbers that must be drawn in another order
                    refused.append(error)
                    break
                best = min(best, tried[-1].seconds)
                if chunks is None and tried[-1].seconds > _TOO_LONG * best:
                    break  # more will only take longer
        if not tried:
            raise refused[0]
        if not any(one.fits for one in tried):
            least = min(one.nbytes for one in tried)
            raise ScheduleError(
                f"no way fits into the memory of the devices: at least {least / 1e9:.3g} GB are needed on one; "
                f"use more devices{'' if self.planner.checkpoint else ', or checkpoint=True'}"
            )
        return Curve(most, tuple(tried))

    def planned(self, curve: Curve) -> Planned:
        """Capture the best of a curve."""
        best = curve.best
        sizes = tuple(shares(rows, best.chunks) for rows in self.own)
        every = list(dict.fromkeys(size for own in sizes for size in own))
        variant = self._variant(best.order, (min(every), max(every)))
        made = {size: self._pieces(size, variant, best.order) for size in every}
        one = made[every[0]][0].template
        homes = made[every[0]][0].homes
        several = self.planner.replicas > 1
        buckets = self._buckets(one, homes, several)
        updates = self.trained.updates(one, buckets, several)
        grid = replace(
            self._grid(best.order, sizes, made, variant), buckets=buckets, updates=updates
        )
        reduction = self._reduction(grid)
        schedule, built = self.trained.scheduled(replace(grid, reduction=reduction))
        notes = {"curve": curve, "order": best.order, "chunks": best.chunks, "cuts": variant.cuts}
        notes["reduction"] = reduction
        return Planned(schedule, built, one, grid.updates[0].state, notes)

    def _reduction(self, grid: Grid) -> str:
        """Return the strategy of summing that is fastest after the last micro-batch of each replica."""
        names = self.planner.sums.strategies(len(grid.devices))
        if len(names) == 1:
            return names[0]
        last = replace(grid, rows=tuple(own[-1:] for own in grid.rows), order=None)
        plans = self.trained.reduced(last, self.planner.sums)
        return min(plans, key=lambda name: plans[name][0].makespan)

    def _buckets(
        self, one: Template, homes: Mapping[str, int], several: bool
    ) -> tuple[Bucket, ...]:
        """Return the parameters of each stage, in buckets for several replicas."""
        stages: dict[int, dict[str, torch.Tensor]] = {}
        for name in one.gradients:
            stages.setdefault(homes[name], {})[name] = one.examples[name]
        found: list[Bucket] = []
        for stage, own in stages.items():
            ready = [(name, tensor.nbytes, tensor.dtype) for name, tensor in own.items()]
            groups = buckets(ready, self.planner.sums.sizes) if several else [tuple(own)]
            found += [Bucket(stage, {name: own[name] for name in names}) for names in groups]
        return tuple(found)

    # ---- one way to do it

    def _orders(self, pair: tuple[int, int]) -> list[str]:
        """Return the orders to try: those that are possible for the stages, if the user has chosen these."""
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
            f"schedule {wanted!r} cannot run the stages of split=, on {', '.join(devices)} in turn{known}"
        )

    def _layout(self, order: str) -> tuple[str, ...]:
        """Return the device of each stage."""
        devices = self.planner.used
        return (
            devices
            if order == SERIAL
            else tuple(devices[r] for r in stage_devices(ORDERS[order](len(devices), 1)))
        )

    def _pass(self, size: int) -> Template:
        if size not in self.passes:
            self.passes.update(self.trained.passes(self.batch, [size], self.rows))
        return self.passes[size]

    def _variant(self, order: str, pair: tuple[int, int]) -> _Variant:
        """Return how the model is cut for an order."""
        layout = self._layout(order)
        apart = order == "zero-bubble"
        if (layout, apart) not in self.variants:
            large = self._pass(pair[1])
            costs = Costs.estimate(large.graph, large.examples)
            split = self.planner.split
            if isinstance(split, str):
                cuts = balanced(
                    large.graph,
                    costs,
                    self.machine,
                    layout,
                    self._held(large),
                    self._least(costs, pair),
                )
            else:
                cuts = by_map(large.graph, costs, self.machine, split)
            first, more = self._rewritten(large, cuts, order)
            whole = _costs(more)
            scaling = Scaling(
                whole if pair[0] == pair[1] else self._costs(pair[0], cuts, order), whole, pair
            )
            self.variants[layout, apart] = _Variant(
                cuts, *self._merged(first, more, whole, apart), scaling
            )
        return self.variants[layout, apart]

    def _held(self, one: Template) -> dict[str, float]:
        """Return the bytes that belong to each tensor of the model: itself, its gradient, the optimizer's state."""
        moments = self._moments(one)
        held = {
            name: float(one.examples[name].nbytes)
            for name in one.state.tensors()
            if name in one.examples
        }
        return held | {
            name: 2.0 * one.examples[name].nbytes + moments.get(name, 0.0) for name in one.gradients
        }

    def _moments(self, one: Template) -> dict[str, float]:
        """Return the bytes that the optimizer holds for each parameter.

        Where memory is limited, after a step.
        """
        names = {id(tensor): name for name, tensor in one.state.parameters.items()}
        now = {
            names[id(parameter)]: float(
                sum(item.nbytes for item in state.values() if isinstance(item, torch.Tensor))
            )
            for parameter, state in self.trained.optimizer.state.items()
            if id(parameter) in names and state
        }
        if self._is_limited and any(name not in now for name in one.gradients):
            if self.begun is None:
                self.begun = self._begun(one)
            now = self.begun | now
        return now

    def _begun(self, one: Template) -> dict[str, float]:
        """Return the bytes of state that the optimizer creates for each parameter in its next step."""
        found: dict[str, float] = {}
        everything = Bucket(0, {name: one.examples[name] for name in one.gradients})
        for update in self.trained.updates(one, [everything], flat=False):
            for output, nbytes in update.begun.items():
                kind, *path = update.places[output]
                if kind == "moment":
                    found[path[1]] = found.get(path[1], 0.0) + nbytes
        return found

    @property
    def _is_limited(self) -> bool:
        return any(not math.isinf(device.nbytes) for device in self.machine.devices)

    def _least(self, costs: Costs, pair: tuple[int, int]) -> Costs:
        """Return the costs of the smallest micro-batch, if memory is limited; otherwise of any."""
        if pair[0] == pair[1] or not self._is_limited:
            return costs
        small = self._pass(pair[0])
        return Costs.estimate(small.graph, small.examples)

    def _rewritten(self, one: Template, cuts: Cuts, order: str) -> tuple[_Staged, _Staged]:
        """Return the templates of first and further micro-batches, with the stages of tasks."""
        stage: Mapping[str, int] = cuts.stages(one.graph)
        if order == "zero-bubble":
            one, stage = halved(one, stage)
        if self.planner.checkpoint:
            one, stage = checkpointed(one, stage)
        return (one, stage), (accumulating(one), stage)

    def _costs(self, size: int, cuts: Cuts, order: str) -> Costs:
        return _costs(self._rewritten(self._pass(size), cuts, order)[1])

    def _merged(
        self, first: _Staged, more: _Staged, costs: Costs, apart: bool
    ) -> tuple[Pieces, Pieces]:
        make = partial(
            pieces_of,
            costs=costs,
            machine=self.machine,
            apart=apart,
            branching=self.planner.order == SERIAL,
        )
        return make(*first), make(*more)

    def _pieces(self, size: int, variant: _Variant, order: str) -> tuple[Pieces, Pieces]:
        """Capture micro-batches of a size."""
        if size == variant.scaling.rows[1]:
            return variant.first, variant.more
        first, more = self._rewritten(self._pass(size), variant.cuts, order)
        return self._merged(first, more, _costs(more), order == "zero-bubble")

    def _tried(self, order: str, chunks: int, pair: tuple[int, int]) -> Tried:
        """Simulate without a limit of memory."""
        variant = self._variant(order, pair)
        sizes = shares(self.own[0], chunks)
        made = {
            size: tuple(self._scaled(one, variant, size) for one in (variant.first, variant.more))
            for size in dict.fromkeys(sizes)
        }
        roomy = tuple(replace(device, nbytes=math.inf) for device in self.machine.devices)
        trained = replace(self.trained, machine=replace(self.machine, devices=roomy))
        schedule, _ = trained.scheduled(self._grid(order, (sizes,), made, variant))
        devices = dict.fromkeys(variant.cuts.devices)
        timeline = schedule.simulate()
        busy = sum(
            s.seconds for s in timeline.spans if s.kind == "run" and s.streams[0].device in devices
        )
        idle = 1 - busy / (len(devices) * timeline.makespan) if timeline.makespan else 0.0
        peak: dict[str, float] = {device: schedule.peak_bytes[device] for device in devices}
        for name, nbytes in self._moments(variant.first.template).items():
            peak[variant.cuts.devices[variant.first.homes.get(name, 0)]] += nbytes
        fits = all(peak[device] <= self.machine.device(device).nbytes for device in devices)
        return Tried(order, chunks, timeline.makespan, idle, max(peak.values()), fits)

    def _scaled(self, pieces: Pieces, variant: _Variant, size: int) -> Pieces:
        """Return the pieces for another size."""
        seconds, nbytes = costs_of(pieces.graph, variant.scaling.costs(size), self.machine)
        return replace(pieces, seconds=seconds, nbytes=nbytes)

    def _grid(
        self,
        order: str,
        sizes: tuple[tuple[int, ...], ...],
        made: Mapping[int, tuple[Pieces, ...]],
        variant: _Variant,
    ) -> Grid:
        """Return the grid of as many replicas as there are ``sizes``."""
        first = {size: pieces[0] for size, pieces in made.items()}
        more = {size: pieces[1] for size, pieces in made.items()}
        cuts = variant.cuts
        ranks = [list(dict.fromkeys(cuts.devices)).index(device) for device in cuts.devices]
        devices = tuple(
            cuts.devices if not number else tuple(group[rank] for rank in ranks)
            for number, group in enumerate(self.planner.groups[: len(sizes)])
        )
        chunks = max(map(len, sizes))
        actions = self._order(order, chunks, next(iter(first.values())), cuts)
        homes = batch_homes(variant.first.template, self.batch)
        return Grid("pipeline", self.machine, devices, sizes, first, more, (), (), actions, homes)

    def _order(self, order: str, chunks: int, pieces: Pieces, cuts: Cuts) -> Order | None:
        """Return the actions of each device."""
        count = len(dict.fromkeys(cuts.devices))
        if order == SERIAL:
            return None
        if order != "zero-bubble":
            return ORDERS[order](count, chunks)
        seconds: dict[Kind, list[float]] = {
            "F": [0.0] * len(cuts),
            "I": [0.0] * len(cuts),
            "W": [0.0] * len(cuts),
        }
        for task, piece in pieces.piece.items():
            kind: Kind = piece.kind if piece.kind != "R" else "F"
            seconds[kind][piece.stage] += pieces.seconds[task][cuts.devices[piece.stage]]
        copies = [
            self.machine.copy_seconds(a, b, n)
            for a, b, n in zip(cuts.devices, cuts.devices[1:], cuts.nbytes, strict=False)
        ]
        return zero_bubble(count, chunks, seconds=seconds, copy=max(copies, default=0.0))


_TOO_LONG = 1.2
SERIAL = "serial"  # one micro-batch after another
