"""Compute positions, ticks and labels of numbers on an axis.

Numbers are decimals, so that ticks are exactly the round numbers that are shown, however large,
small or close they are. Draws nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from functools import cached_property
from numbers import Real
from typing import Any

from autosched._lib.allowed import is_number
from autosched.errors import ChartError, shown

__all__ = ["Scale", "decimal"]

_PREFIXES = {-9: "n", -6: "u", -3: "m", 0: "", 3: "k", 6: "M", 9: "G", 12: "T", 15: "P"}
_SMALL = range(-9, 1)  # powers of ten that units of time and of amounts have prefixes for
_LARGE = range(16)
_UNITS = {"s": _SMALL, "B": _LARGE, "B/s": _LARGE, "FLOP": _LARGE, "FLOP/s": _LARGE}
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def decimal(item: Any, what: str) -> Decimal:
    """Return a number as a decimal with the digits of its repr. Raises ChartError if not finite.

    >>> decimal(0.1, "width")
    Decimal('0.1')
    """
    if not (is_number(item) or (isinstance(item, Real) and is_number(-item))):
        raise ChartError(f"{what} must be a finite number, got {shown(item)}")
    return Decimal(repr(float(item)))


@dataclass(frozen=True)
class Scale:
    """The numbers from ``low`` to ``high``, which differ; ``log`` for a logarithmic scale.

    >>> scale = Scale.over([Decimal(0), Decimal("0.0042")], unit="s")
    >>> list(scale.marked(scale.ticks(5)).values()), scale.unit_text
    (['0', '1', '2', '3', '4'], 'ms')
    """

    low: Decimal
    high: Decimal
    unit: str = ""
    log: bool = False

    @classmethod
    def over(cls, values: Sequence[Decimal], unit: str = "", log: bool = False) -> Scale:
        """Return a scale from the least to the greatest value, or around a single value."""
        low = min(values, default=Decimal(log))
        high = max(values, default=Decimal(log))
        if low == high and log:
            low = low / 2
            high = high * 2
        elif low == high:
            low = low - abs(low) / 2
            high = high + (abs(high) / 2 or 1)
        return cls(low, high, unit, log)

    def rounded(self, most: int) -> Scale:
        """Return a scale that begins and ends at ticks, with at most ``most`` steps: 6 or more."""
        step = self._step(most)
        low = (self.low / step).to_integral_value(ROUND_FLOOR) * step
        whole = Scale(low, (self.high / step).to_integral_value(ROUND_CEILING) * step, self.unit)
        return (
            whole if whole._step(most) == step else whole.rounded(most)
        )  # the extension may have added a step too many

    def at(self, value: Decimal) -> float:
        """Return the position of a number, from 0 at ``low`` to 1 at ``high``."""
        low = self.low
        high = self.high
        if self.log:
            low = low.log10()
            high = high.log10()
            value = value.log10()
        return float((value - low) / (high - low))

    def ticks(self, most: int) -> list[Decimal]:
        """Return round numbers on the scale, about ``most`` of them or fewer."""
        if self.log:
            return self._powers(most)
        step = self._step(most)
        first = int((self.low / step).to_integral_value(ROUND_CEILING))
        last = int((self.high / step).to_integral_value(ROUND_FLOOR))
        return [i * step for i in range(first, last + 1)]

    def _step(self, most: int) -> Decimal:
        least = (self.high - self.low) / most
        return next(
            s for s in (Decimal(d).scaleb(least.adjusted()) for d in (1, 2, 5, 10)) if s >= least
        )

    def _powers(self, most: int) -> list[Decimal]:
        """Return 1, 2, 5, 10, ... if these are few; else powers of ten, or some of them."""
        powers = range(self.low.adjusted(), self.high.adjusted() + 1)
        fine = self._within(Decimal(digit).scaleb(power) for power in powers for digit in (1, 2, 5))
        if len(fine) <= most:
            return fine
        whole = self._within(Decimal(1).scaleb(power) for power in powers)
        return whole[:: -(-len(whole) // most) or 1]

    def _within(self, values: Iterable[Decimal]) -> list[Decimal]:
        return [value for value in values if self.low <= value <= self.high]

    # ---- writing

    @cached_property
    def exponent(self) -> int:
        """The power of ten in which numbers are written, for units or for shorter numbers."""
        power = max(abs(self.low), abs(self.high)).adjusted()
        thousands = power // 3 * 3
        if self.log or (thousands not in _UNITS.get(self.unit, ()) and -3 <= power < 6):
            return 0
        return thousands

    @property
    def unit_text(self) -> str:
        """The unit in which numbers are written: ``ms``, or ``10⁶ images``."""
        if self.exponent in _UNITS.get(self.unit, (0,)):
            return _PREFIXES[self.exponent] + self.unit
        return f"{_power(self.exponent)} {self.unit}".strip()

    def marked(self, values: Iterable[Decimal]) -> dict[Decimal, str]:
        """Return numbers in ``unit_text`` with all digits, and equally many decimal places."""
        scaled = {value: value.scaleb(-self.exponent).normalize() for value in values}
        places = 0 if self.log else max(map(_places, scaled.values()), default=0)
        return {value: _written(number, places) for value, number in scaled.items()}

    def short(self, value: Decimal) -> str:
        """Return a number with its unit, to three digits or as an integer."""
        value = value.scaleb(-self.exponent)
        rounded = Context(prec=max(3, value.adjusted() + 1)).plus(value).normalize()
        return f"{_written(rounded)} {self.unit_text}".strip()


def _written(value: Decimal, places: int = 0) -> str:
    """Format a number with at least some decimal places, or with a power of ten if shorter."""
    power = value.adjusted()
    if not value:
        return "0"
    if -5 < power < 7:
        return f"{value:,.{max(places, _places(value))}f}"
    digits = value.scaleb(-power)
    return _power(power) if digits == 1 else f"{digits:f}·{_power(power)}"


def _places(value: Decimal) -> int:
    return max(0, -int(value.as_tuple().exponent))


def _power(exponent: int) -> str:
    return "10" + str(exponent).translate(_RAISED)
