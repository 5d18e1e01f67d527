"""What every official client must see of a server, written once.

A behaviour is a function over `Client` and `Box` of `drivers`; its further parameters are fixtures of `conftest.py`.
It names the features that not every client has, and runs with each client that has them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module

from clients import Spec

#: Parts of the list, in the order of the table.
PARTS = ("lifecycle", "commands", "files", "errors", "endpoints", "load")


@dataclass(frozen=True)
class Behaviour:
    """One line of the table."""

    part: str
    check: Callable[..., None]
    needs: frozenset[str]
    basic: bool
    #: Client → why its own fault keeps it from being checked.
    faults: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.check.__name__

    @property
    def title(self) -> str:
        return self.name.replace("_", " ")

    def gap(self, spec: Spec) -> str | None:
        """Why the behaviour is not checked with a client; `None` when it is."""
        if spec.old and not self.basic:
            return "old"
        if self.needs & spec.missing:
            return "lacks"
        return "fault" if spec.name in self.faults else None


BEHAVIOURS: list[Behaviour] = []


def behaviour(*needs: str, basic: bool = False, faults: dict[str, str] | None = None):
    """Puts a function on the list. `basic` ones are checked with old clients too."""

    def add(check: Callable[..., None]) -> Callable[..., None]:
        part = check.__module__.rpartition(".")[2]
        BEHAVIOURS.append(Behaviour(part, check, frozenset(needs), basic, faults or {}))
        return check

    return add


for _part in PARTS:
    import_module(f"behaviours.{_part}")
