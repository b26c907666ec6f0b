"""Pipelines: stages of a model that work on different micro-batches concurrently, or one at a time.

Arguments that are not given are found by simulation. Two captured sizes give the costs of each
operator for any number of rows. So alternatives are simulated without capturing them; only the best
is captured. Many micro-batches have small bubbles, but they cost more launches, and their work is too
small to use a device well: the best number is that of the shortest predicted step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple

import torch

from autosched import Costs, Machine, ScheduleError
from autosched.errors import MemoryLimitError
from autosched.parallel.all_reduce import SIZES, buckets, check_sizes
from autosched.parallel.batches import batch_homes, check_count, divided, rows_of, shares
from autosched.parallel.costs import interpolated
from autosched.parallel.micro_batch import MicroBatch, micro_batch_of
from autosched.parallel.named_orders import BEST, ORDERS, check_order, order_of
from autosched.parallel.orders import KINDS, Order, Rows
from autosched.parallel.stages import Cuts, balanced, by_map
from autosched.parallel.step import Step
from autosched.parallel.step_graph import StepSpec
from autosched.parallel.template import (
    Loss,
    Template,
    accumulating,
    split_convolutions,
)
from autosched.parallel.training import Captures, Planned, Training, check_strategy
from autosched.parallel.updates import Bucket
from autosched.viz import charts

SERIAL = "serial"  # one micro-batch after another
Split = Literal["auto"] | Mapping[str, str]


def pipeline(
    model: torch.nn.Module,
    loss_fn: Loss,
    optimizer: torch.optim.Optimizer,
    machine: Machine | None = None,
    *,
    devices: Sequence[str] | None = None,
    split: Split = "auto",
    chunks: int | Literal["auto"] = "auto",
    schedule: str | Order = "auto",
    stages: int | None = None,
    memory: float | None = None,
    replicas: int = 1,
    reduction: str = "auto",
    buckets: Sequence[float] = SIZES,
    clip_grad_norm: float | None = None,
    averages: bool = True,
    **options: Any,
) -> Pipeline:
    """Return a training step that cuts a model into stages, and batches into micro-batches.

    The result for a batch of any size is that of the model on its micro-batches one after another,
    with accumulated gradients. It equals that of the whole batch in one pass, except for rounding,
    and for batch norms, which see one micro-batch each. Each device keeps its part of the model,
    which remains the user's own: its ``state_dict`` is unchanged.

    * ``devices``: those of the stages, in order; default: all accelerators.
    * ``split``: as of ``model_parallel``; ``"auto"`` cuts so that stages take equally long, and
      fit.
    * ``chunks``: how many micro-batches; ``"auto"`` tries many by simulation: see ``curve``.
    * ``schedule``: an ``Order``, or the name of one: see ``order``; ``"auto"`` tries all.
    * ``stages``: how many each device has, where ``schedule`` leaves that open.
    * ``memory``: of how many micro-batches a device may hold activations; default: as many as fit.
    * ``replicas``: how many pipelines share the batch, each on as many devices; their gradients are
      summed as in ``data_parallel``, whose ``reduction`` and ``buckets`` these are.
    * ``clip_grad_norm``: clip gradients, all together, by that norm as torch does;
      ``step.grad_norm`` is the norm before. Hooks of the optimizer's step may change each gradient
      by itself.
    * ``averages``: whether ``loss_fn`` averages over a batch; otherwise it sums. ``options`` are
      those of ``data_parallel``.

    On a machine of several ranks, all call this and pass the same batches, of which each reads what
    its stages need; all get the loss. Rank 0's model counts at the beginning. Later each rank has
    the state of its own stages: see ``step.collect()``.

    Random numbers are generated in the order of the micro-batches, on several ranks each from the
    generator of its stage's rank. Raises ScheduleError for invalid arguments.

    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> how = {"machine": Machine.emulated(gpus=2), "chunks": 2, "backend": "host"}
    >>> step = pipeline(model, torch.nn.MSELoss(), optimizer, **how)
    >>> step(torch.ones(6, 4), torch.zeros(6, 2)) > step(torch.ones(6, 4), torch.zeros(6, 2))
    tensor(True)
    """
    check_count("chunks", 1 if chunks == "auto" else chunks)
    check_sizes(buckets)
    _check_schedule(schedule, stages, memory)
    trained = (model, loss_fn, optimizer)
    training = Training.of("pipeline", trained, machine, devices, options, averages, clip_grad_norm)
    count = len(training.devices)
    if isinstance(schedule, Order):
        chunks = schedule.chunks if chunks == "auto" else chunks
        wanted = f"{len(schedule.rows) * replicas} devices and {schedule.chunks} micro-batches"
        if (len(schedule.rows) * replicas, schedule.chunks) != (count, chunks):
            raise ScheduleError(f"schedule= is for {wanted}, not for {count} and {chunks}")
    if not isinstance(replicas, int) or replicas < 1 or count % replicas:
        raise ScheduleError(
            f"{count} devices cannot be divided among replicas={replicas!r}, each with as many"
        )
    if replicas > 1 and not isinstance(split, str):
        raise ScheduleError(
            "split= names the devices of one pipeline; with replicas= give split='auto' and "
            "devices="
        )
    how = (replicas, check_strategy(reduction), tuple(buckets))
    return Pipeline(
        training, partial(_Study, training, split, schedule, stages, memory, *how), chunks
    )


def model_parallel(
    model: torch.nn.Module,
    machine: Machine | None = None,
    *,
    loss_fn: Loss | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    devices: Sequence[str] | None = None,
    split: Split = "auto",
    clip_grad_norm: float | None = None,
    averages: bool = True,
    **options: Any,
) -> Pipeline:
    """Return a training step of a model whose parts are on several devices.

    For models that do not fit on one device. One batch goes through one stage after another, so one
    device works at a time; ``pipeline`` lets the stages work concurrently. For forward alone,
    ``asc.compile(model, machine, place=...)`` places modules.

    ``split`` is ``"auto"``, one stage per device, cut so that they take equally long and fit; or
    the devices of modules by patterns of their names, ``{"layer1": "cuda:0", "layer2.*":
    "cuda:1"}``, which also match the modules inside: the first match counts, and a module that no
    pattern matches joins the one that runs before it. The other arguments are those of
    ``pipeline``. Raises ScheduleError for an impossible split.

    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> machine, split = Machine.emulated(gpus=2), {"0": "cuda:0", "2": "cuda:1"}
    >>> how = {"loss_fn": torch.nn.MSELoss(), "optimizer": torch.optim.SGD(model.parameters(), 0.1)}
    >>> step = model_parallel(model, machine, split=split, backend="host", **how)
    >>> step.cuts(torch.ones(3, 4), torch.ones(3, 2)).devices
    ('cuda:0', 'cuda:1')
    """
    if loss_fn is None or optimizer is None:
        raise ScheduleError(
            "model_parallel trains, and needs both loss_fn= and optimizer=; for forward alone, use "
            "autosched.compile(model, machine, place=...)"
        )
    trained = (model, loss_fn, optimizer)
    training = Training.of(
        "model_parallel", trained, machine, devices, options, averages, clip_grad_norm
    )
    return Pipeline(training, partial(_Study, training, split, SERIAL), 1)


def _check_schedule(schedule: str | Order, stages: int | None, memory: float | None) -> None:
    if isinstance(schedule, Order):
        schedule.check_memory(memory)
        if stages is not None and stages * len(schedule.rows) != len(schedule.devices):
            raise ScheduleError(f"schedule= has other stages than stages={stages!r} per device")
        return
    if schedule != "auto" and schedule not in ORDERS:
        raise ScheduleError(
            f"schedule must be an Order, 'auto' or one of {', '.join(map(repr, ORDERS))}, got "
            f"{schedule!r}"
        )
    check_order("interleaved" if schedule == "auto" else schedule, stages, memory)


class Pipeline(Step):
    """A training step of a pipeline."""

    def __init__(
        self,
        training: Training,
        study: Callable[..., _Study],
        chunks: int | Literal["auto"],
    ):
        def plan(batch: Sequence[Any], counts: Sequence[int]) -> Planned:
            found = study(batch=batch, rows=counts[0])
            return found.planned(found.curve(None if chunks == "auto" else [chunks]))

        super().__init__(training, plan, divided=False)
        self._study = study

    def cuts(self, *batch: Any) -> Cuts:
        """Return the stages of such a batch: their modules, devices and seconds."""
        found: Cuts = self.notes(*batch)["cuts"]
        return found

    def curve(self, *batch: Any, chunks: Sequence[int] | None = None) -> Curve:
        """Return the predicted seconds of a step by order and number of micro-batches.

        By default, many numbers are tried.
        """
        with self._guard:
            return self._study(batch=batch, rows=rows_of(batch)).curve(chunks)


# ---- the choice of stages, schedule and number of micro-batches


_MOST_REPEATED = 3  # ways that do not fit even so, until the others are left
_TOO_LONG = 1.2  # times the best: more micro-batches only take longer
_Pair = tuple[MicroBatch, MicroBatch]  # the first micro-batch, and further ones


class _Variant(NamedTuple):
    """A model cut for an order: its stages, micro-batches of ``rows``, and costs by number of rows."""

    cuts: Cuts
    rows: int
    micro_batches: _Pair
    costs: dict[int, Costs]


@dataclass
class _Study:
    """The captures and simulations for one kind of batch."""

    training: Training
    split: Split
    schedule: str | Order
    stages: int | None = None  # of each device
    memory: float | None = None
    replicas: int = 1
    reduction: str = "sum"
    sizes: Sequence[float] = ()  # of buckets
    _: KW_ONLY
    batch: Sequence[Any]
    rows: int

    def __post_init__(self) -> None:
        self.machine = self.training.machine
        self.shares = divided(self.rows, [1] * self.replicas)  # rows of each replica
        self.captures = Captures(self.training, self.batch, self.rows)
        self.variants: dict[tuple[tuple[str, ...], bool], _Variant] = {}
        self.best_stages: int | None = None  # of each device, for the best order
        self.best_memory: dict[int, float | None] = {}  # of the best order, by micro-batches
        # Bytes that the optimizer adds, by parameter.
        self.new_state: dict[str, float] | None = None

    @cached_property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """The devices of each replica, in the order of stages."""
        devices = self.training.devices
        if not isinstance(self.split, str):
            devices = tuple(dict.fromkeys(self.split.values()))
        n = len(devices) // self.replicas
        return tuple(devices[i * n : (i + 1) * n] for i in range(self.replicas))

    def curve(self, chunks: Sequence[int] | None) -> Curve:
        """Simulate each order with each possible number of micro-batches."""
        most = self.shares[0]
        numbers = candidates(most) if chunks is None else [min(number, most) for number in chunks]
        sizes = [size for number in numbers for size in shares(most, number)]
        # Batch norms refuse one row, so the smaller of the two captures has more if possible.
        pair = (min(max(2, min(sizes)), max(sizes)), max(sizes))
        tried = list[Tried]()
        errors = list[ScheduleError]()
        for name in self._orders(pair):
            best = math.inf
            fitting = [one for one in tried if one.fits]
            if name == BEST and fitting:  # which takes long to find
                fastest = min(fitting, key=lambda one: one.seconds)
                numbers, self.best_stages = [fastest.chunks], self._stages_of(fastest.order)
            for number in numbers:
                try:
                    tried.append(self._tried(name, number, pair))
                except ScheduleError as error:  # such as random numbers in another order
                    errors.append(error)
                    break
                best = min(best, tried[-1].seconds)
                if chunks is None and tried[-1].seconds > _TOO_LONG * best:
                    break
        if not tried:
            raise errors[0]
        tried += self._repeated(tried, pair)
        if not any(one.fits for one in tried):
            least = min(one.nbytes for one in tried)
            raise ScheduleError(
                f"no way fits into the memory of the devices: at least {least / 1e9:.3g} GB are "
                f"needed on one; use more devices"
            )
        return Curve(most, tuple(tried))

    def planned(self, curve: Curve) -> Planned:
        best = curve.best
        rows = tuple(shares(own, best.chunks) for own in self.shares)
        sizes = list(dict.fromkeys(size for own in rows for size in own))
        variant = self._variant(best.order, (min(sizes), max(sizes)))
        made = {size: self._micro_batches(size, variant, best.order) for size in sizes}
        spec = self._spec(best.order, rows, made, variant)
        spec = replace(spec, buckets=self._buckets(spec.one))
        notes = {"curve": curve, "order": best.order, "chunks": best.chunks, "cuts": variant.cuts}
        plans = self.training.plans(spec, self.reduction, notes)
        return self.training.best(plans)

    def _buckets(self, one: MicroBatch) -> tuple[Bucket, ...]:
        """Return the parameters of each stage, in buckets for several replicas."""
        examples = one.template.examples
        stages: dict[int, list[str]] = {}
        for name in one.template.gradients:
            stages.setdefault(one.input_stages[name], []).append(name)
        found: list[Bucket] = []
        for stage, own in stages.items():
            groups: Sequence[Sequence[str]] = [own]
            if self.replicas > 1:
                ready = [(name, examples[name].nbytes, examples[name].dtype) for name in own]
                groups = buckets(ready, self.sizes)
            found += [Bucket(stage, {n: examples[n] for n in names}) for names in groups]
        return tuple(found)

    # ---- variants: a model cut for an order

    def _orders(self, pair: tuple[int, int]) -> list[str]:
        """Return the orders to try: those that are possible for the stages of ``split=``."""
        wanted = self.schedule
        if isinstance(self.split, str):
            return self._possible() if wanted == "auto" else [_name(wanted)]
        devices = self._variant(SERIAL, pair).cuts.devices
        if self.stages is None and len(devices) % len(self.groups[0]) == 0:
            self.stages = len(devices) // len(self.groups[0])
        fitting = [name for name in self._possible() if self._layout(name) == devices]
        if wanted == "auto" and fitting:
            return fitting
        if _name(wanted) in (*fitting, SERIAL) or (
            isinstance(wanted, Order) and self._layout(wanted.name) == devices
        ):
            return [_name(wanted)]
        known = f"; {', '.join(map(repr, fitting))} can run them" if fitting else ""
        raise ScheduleError(
            f"schedule {_name(wanted)!r} cannot run the stages of split=, on {', '.join(devices)} in "
            f"turn{known}"
        )

    def _possible(self) -> list[str]:
        """Return the orders that can have so many stages."""
        return [n for n, one in ORDERS.items() if self.stages is None or one.can_have(self.stages)]

    def _layout(self, name: str) -> tuple[str, ...]:
        devices = self.groups[0]
        if name == SERIAL:
            return devices
        if isinstance(self.schedule, Order):
            places = self.schedule.devices
        else:
            places = ORDERS[name].places(len(devices), self._stages_of(name))
        return tuple(devices[rank] for rank in places)

    def _stages_of(self, name: str) -> int:
        """Return how many stages of an order each device has."""
        wanted = self.best_stages if self.stages is None and name == BEST else self.stages
        return ORDERS[name].laps[0] if wanted is None else wanted

    def _splits_backward(self, name: str) -> bool:
        if isinstance(self.schedule, Order):
            return self.schedule.splits_backward
        return name != SERIAL and ORDERS[name].splits_backward

    def _pass(self, size: int) -> Template:
        return self.captures.of([size])[size]

    def _variant(self, name: str, pair: tuple[int, int]) -> _Variant:
        key = self._layout(name), self._splits_backward(name)
        if key not in self.variants:
            cuts = self._cuts(key[0], pair)
            micro_batches = self._merged(pair[1], cuts, name)
            costs = {pair[1]: micro_batches[1].costs}
            if pair[0] != pair[1]:
                (_, more), _ = self._rewritten(pair[0], cuts, name)
                costs[pair[0]] = more.estimate.costs
            self.variants[key] = _Variant(cuts, pair[1], micro_batches, costs)
        return self.variants[key]

    def _cuts(self, layout: tuple[str, ...], pair: tuple[int, int]) -> Cuts:
        large = self._pass(pair[1])
        costs = large.estimate.costs
        split = self.split
        if not isinstance(split, str):
            return by_map(large.graph, costs, self.machine, split)
        least = costs  # activations of the smallest micro-batch, if memory is limited
        if pair[0] != pair[1] and self._is_limited:
            least = self._pass(pair[0]).estimate.costs
        state = self._state_nbytes(large)
        try:
            return balanced(large.graph, costs, self.machine, layout, state, least)
        except ScheduleError:  # activations need not be kept
            return balanced(large.graph, costs, self.machine, layout, state, Costs())

    def _rewritten(
        self, size: int, cuts: Cuts, name: str
    ) -> tuple[tuple[Template, Template], Mapping[str, int]]:
        """Return templates of the first and further micro-batches, and stages of tasks."""
        one = self._pass(size)
        stage: Mapping[str, int] = cuts.stages(one.graph)
        if self._splits_backward(name):
            one, stage = split_convolutions(one, stage)
        more = accumulating(one)
        return (one, more), stage

    def _merged(self, size: int, cuts: Cuts, name: str) -> _Pair:
        """Capture micro-batches of a size, and merge their graphs."""
        templates, stage = self._rewritten(size, cuts, name)
        splits = self._splits_backward(name)
        first, more = (
            micro_batch_of(template, stage, self.machine, split_backward=splits)
            for template in templates
        )
        return first, more

    def _micro_batches(self, size: int, variant: _Variant, name: str) -> _Pair:
        if size == variant.rows:
            return variant.micro_batches
        return self._merged(size, variant.cuts, name)

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

    def _tried(self, name: str, chunks: int, pair: tuple[int, int]) -> Tried:
        """Simulate a step; the best order with fewer and fewer micro-batches, until it fits."""
        limits: Sequence[float | None] = [self.memory]
        if name == BEST and self.memory is None and self._is_limited:
            p = len(self.groups[0])
            several = {min(n, chunks) for n in (chunks, 2 * p, p, p // 2 + 1, (p + 4) // 3, 1)}
            limits = sorted(several, reverse=True)
        for memory in limits:
            self.best_memory[chunks] = memory
            found = self._simulated(name, chunks, pair)
            if found.fits:
                break
        return found

    def _repeated(self, tried: Sequence[Tried], pair: tuple[int, int]) -> list[Tried]:
        """Simulate what exceeds the memory again, with tasks that are repeated.

        These take a third of a step at most. The most promising ways are simulated, if they can be
        faster than what fits. Raises MemoryLimitError if nothing fits, also then.
        """
        fitting = [one for one in tried if one.fits]
        found = list[Tried]()
        errors = list[MemoryLimitError]()
        tight = [one for one in tried if not one.fits and one.excess < 1]
        for one in sorted(tight, key=lambda one: one.seconds * (1 + one.excess / 3)):
            best = min((other.seconds for other in (*fitting, *found)), default=math.inf)
            if one.seconds < best and len(errors) < _MOST_REPEATED:
                try:
                    found.append(self._simulated(one.order, one.chunks, pair, limited=True))
                except MemoryLimitError as error:
                    errors.append(error)
        if errors and not (fitting or found):
            raise errors[0]
        return found

    def _simulated(
        self, name: str, chunks: int, pair: tuple[int, int], limited: bool = False
    ) -> Tried:
        """Simulate a step, without a limit of memory, or with tasks that are repeated to keep to it."""
        variant = self._variant(name, pair)
        sizes = shares(self.shares[0], chunks)
        made = {size: self._scaled(variant, size) for size in dict.fromkeys(sizes)}
        spec = self._spec(name, (sizes,), made, variant)
        held: dict[str, float] = {}
        first = variant.micro_batches[0]
        for tensor, nbytes in self._moments(first.template).items():
            device = variant.cuts.devices[first.input_stages.get(tensor, 0)]
            held[device] = held.get(device, 0.0) + nbytes
        # Each rank simulates by itself, on a machine that is imagined.
        is_apart = self.machine.rank is not None
        imagined = tuple(
            replace(device, imagined=device.imagined or is_apart) for device in self.machine.devices
        )
        training = replace(self.training, machine=replace(self.machine, devices=imagined))
        schedule, _ = training.scheduled(replace(spec, held=held), limited)
        timeline = schedule.simulate()
        devices = dict.fromkeys(variant.cuts.devices)
        runs = (span for span in timeline.spans if span.kind == "run")
        busy = sum(span.seconds for span in runs if span.streams[0].device in devices)
        idle = 1 - busy / (len(devices) * timeline.makespan) if timeline.makespan else 0.0
        peak, course, excess = schedule.peak_bytes, schedule.memory(), [0.0]
        for device in devices:
            over = peak[device] - self.machine.device(device).nbytes
            added = peak[device] - course[device][0][1]
            excess.append(max(0.0, over / added if added else over))
        nbytes, repeated = max(peak[device] for device in devices), len(schedule.recomputed)
        return Tried(name, chunks, timeline.makespan, idle, nbytes, max(excess), repeated)

    def _scaled(self, variant: _Variant, size: int) -> _Pair:
        costs = interpolated(variant.costs, size)
        first, more = (one.costing(costs, self.machine) for one in variant.micro_batches)
        return first, more

    def _spec(
        self,
        name: str,
        rows: tuple[tuple[int, ...], ...],
        made: Mapping[int, _Pair],
        variant: _Variant,
    ) -> StepSpec:
        """Return the step of as many replicas as ``rows`` has, without updates."""
        parts = {(n, not i): one for n, pair in made.items() for i, one in enumerate(pair)}
        cuts = variant.cuts
        distinct = list(dict.fromkeys(cuts.devices))
        ranks = [distinct.index(device) for device in cuts.devices]
        others = self.groups[1 : len(rows)]
        devices = (cuts.devices, *(tuple(group[rank] for rank in ranks) for group in others))
        actions = self._actions(name, max(map(len, rows)), made, variant)
        homes = batch_homes(variant.micro_batches[0].template, self.batch)
        return StepSpec("pipeline", self.machine, devices, rows, parts, order=actions, homes=homes)

    def _actions(
        self, name: str, chunks: int, made: Mapping[int, _Pair], variant: _Variant
    ) -> Rows | None:
        """Return what each device of a replica does, by the seconds of the largest micro-batch."""
        if name == SERIAL:
            return None
        if isinstance(self.schedule, Order):
            found = self.schedule.first(chunks)
        else:
            size = max(made)
            one, cuts = made[size][1], variant.cuts
            seconds = {kind: [0.0] * len(cuts) for kind in KINDS}
            for task, role in one.roles.items():
                if role.kind != "R":
                    kind: Any = "I" if role.kind == "B" else role.kind
                    seconds[kind][role.stage] += one.seconds[task][cuts.devices[role.stage]]
            share = size / variant.rows
            copies = [
                self.machine.copy_seconds(device, after, nbytes * share)
                for device, after, nbytes in zip(
                    cuts.devices, cuts.devices[1:], cuts.nbytes, strict=False
                )
                if device != after
            ]
            memory = self.best_memory.get(chunks) if name == BEST else self.memory
            places = ORDERS[name].places(len(self.groups[0]), self._stages_of(name))
            found = order_of(
                name, [places], chunks, seconds=[*seconds.values()], copy=max(copies, default=0.0),
                memory=memory,
            )  # fmt: skip
        return found.split().rows if self._splits_backward(name) else found.rows


def _name(schedule: str | Order) -> str:
    return schedule if isinstance(schedule, str) else schedule.name


# ---- the predicted times


@dataclass(frozen=True)
class Tried:
    """A simulated way to run a step: an order and a number of micro-batches (``chunks``).

    ``seconds``: the makespan; ``idle``: the share of it in which devices are idle; ``nbytes``: the
    peak memory of a device; ``excess``: the largest part of what a step adds to a device's memory
    that does not fit; ``repeated``: how many tasks are repeated to keep to it.
    """

    order: str
    chunks: int
    seconds: float
    idle: float
    nbytes: float
    excess: float = 0.0
    repeated: int = 0

    @property
    def fits(self) -> bool:
        """Whether each device has enough memory."""
        return self.excess <= 0


@dataclass(frozen=True)
class Curve:
    """The simulated ways to run a step with ``rows`` rows. ``print`` it, or draw it.

    >>> tried = [Tried("gpipe", n, seconds, idle, 1e6) for n, seconds, idle in
    ...          ((1, 4e-3, 0.5), (2, 3e-3, 0.3), (4, 5e-3, 0.2))]
    >>> Curve(8, tuple(tried)).why
    'gpipe with 2 micro-batches of 4 rows: 3 ms'
    """

    rows: int
    tried: tuple[Tried, ...]

    @property
    def best(self) -> Tried:
        """The fastest that fits in memory; of equal ones the first."""
        return min((one for one in self.tried if one.fits), key=lambda one: one.seconds)

    def seconds(self, order: str) -> dict[int, float]:
        """Return the seconds of an order by the number of micro-batches."""
        return {one.chunks: one.seconds for one in self.tried if one.order == order}

    @property
    def why(self) -> str:
        """The best, in words."""
        best = self.best
        plural = "es" if best.chunks > 1 else ""
        what = f"{best.chunks} micro-batch{plural} of {self._size(best.chunks)} rows"
        return f"{best.order} with {what}: {best.seconds * 1e3:.4g} ms"

    def _size(self, chunks: int) -> int:
        return -(-self.rows // chunks)

    def __repr__(self) -> str:
        lines = [f"{'order':>12}{'chunks':>8}{'rows':>6}{'ms':>10}{'idle':>8}{'MB':>10}"]
        for one in self.tried:
            mark = "  does not fit" if not one.fits else "  <- best" if one is self.best else ""
            mark = f"  {one.repeated} tasks repeated{mark}" if one.repeated else mark
            what = f"{one.order:>12}{one.chunks:8}{self._size(one.chunks):6}"
            numbers = f"{one.seconds * 1e3:10.4g}{one.idle:8.1%}{one.nbytes / 1e6:10.4g}"
            lines.append(f"{what}{numbers}{mark}")
        return "\n".join([*lines, self.why])

    def svg(self) -> str:
        """Draw the seconds by the size of a micro-batch, a line for each order."""
        lines = {}
        for name in dict.fromkeys(one.order for one in self.tried):
            seconds = sorted(self.seconds(name).items())
            lines[name] = [(self._size(chunks), each) for chunks, each in seconds]
        title = f"One step with {self.rows} rows, by size of micro-batches"
        x = "rows of a micro-batch"
        return charts.lines(lines, title=title, x=x, y="predicted time", unit="s", log_x=True)


def candidates(rows: int) -> Sequence[int]:
    """Return numbers of micro-batches to try: 1, 2, 3, 4, 6, 8, 12, ..., and one per row.

    >>> candidates(10)
    [1, 2, 3, 4, 6, 8, 10]
    """
    powers = [2**i for i in range(rows.bit_length())]
    return sorted({n for power in powers for n in (power, power * 3 // 2) if n <= rows} | {rows})
