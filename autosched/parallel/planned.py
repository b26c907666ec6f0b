"""The plan of a training step, and what it says of this process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from autosched import Schedule
from autosched.parallel.packing import Reusing
from autosched.parallel.step_spec import Held, StepGraph
from autosched.parallel.template import Place, Template

__all__ = ["Planned"]


@dataclass(frozen=True)
class Planned:
    """The plan for a kind of batch: schedule, meaning of inputs and outputs, state.

    ``settings`` are those of the optimizer that are inputs.
    """

    schedule: Schedule
    built: StepGraph
    template: Template
    state: Any
    notes: Mapping[str, Any]
    settings: tuple[Any, ...]

    def numbers(self) -> dict[str, float] | None:
        """Return the settings of the optimizer that are inputs; None if it needs another plan."""
        found: dict[str, float] = {}
        for settings in self.settings:
            values = settings.reader(self.state)()
            if values is None:
                return None
            found.update(values)
        here = {*self.schedule.inputs_here}
        return {label: found[name] for label, name in self.built.numbers.items() if label in here}

    @cached_property
    def state_here(self) -> dict[str, Held]:
        """The inputs of this process that are state."""
        here = {*self.schedule.inputs_here}
        return {label: held for label, held in self.built.state.items() if label in here}

    @cached_property
    def places_here(self) -> dict[str, Place]:
        """The places of that state, by name of a tensor."""
        known = self.state.places()
        return {held.name: known[held.name][0] for held in self.state_here.values()}

    @cached_property
    def owners(self) -> dict[str, int]:
        """By name of a tensor, the first rank whose model has it as trained; without ranks none."""
        ranks = self.schedule.machine.ranks
        found: dict[str, int] = {}
        for label, held in self.built.state.items():
            home = self.schedule.graph.value(label).home
            if held.leads and home in ranks:
                found[held.name] = min(found.get(held.name, ranks[home]), ranks[home])
        return found

    @cached_property
    def elsewhere(self) -> set[str]:
        """The tensors, by name, that other ranks train, and this process does not."""
        if self.schedule.machine.rank is None:
            return set()
        return self.owners.keys() - {held.name for held in self.state_here.values() if held.leads}

    @cached_property
    def residuals_here(self) -> dict[str, tuple[str, int, torch.dtype]]:
        """The inputs of this process for compression."""
        here = {*self.schedule.inputs_here}
        return {label: one for label, one in self.built.residuals.items() if label in here}

    def release(self) -> None:
        """Give back the memory that tasks keep for the next step."""
        for task in self.schedule.graph.tasks:
            if isinstance(task.fn, Reusing):
                task.fn.release()

    @property
    def is_repeated(self) -> bool:
        """Whether the next step may begin meanwhile: it has the same tensors and attributes."""
        return not self.built.places and not self.template.switches
