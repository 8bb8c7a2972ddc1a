"""The checks by name: each a function that gets a patient and yields findings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from cgkit.errors import CgkitError
from cgkit.measuring.doctor.findings import Finding
from cgkit.measuring.doctor.patient import Patient

Look = Callable[[Patient], Iterator[Finding]]


class Check(NamedTuple):
    """A check: its name, the codes of what it may find, and the function."""

    name: str
    codes: tuple[str, ...]
    look: Look


CHECKS: dict[str, Check] = {}


class NotCheckedError(CgkitError):
    """Raised by a check that cannot look at this patient; the report lists it with the reason."""


def check(*codes: str) -> Callable[[Look], Look]:
    """Registers a function as a check, in the order of import."""

    def register(look: Look) -> Look:
        CHECKS[look.__name__] = Check(look.__name__, codes, look)
        return look

    return register


def all_codes() -> tuple[str, ...]:
    """Every code that a report may hold."""
    return tuple(dict.fromkeys(code for each in CHECKS.values() for code in each.codes))
