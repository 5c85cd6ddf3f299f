"""Plant a fault: on the suite's ranks, in this process, and in the processes that it starts."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from ddp_equivalence.case import settings
from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.faults.fault import Fault

if TYPE_CHECKING:
    from ddp_equivalence.strategies.strategy import Task, TrainStep


class Planted(AbstractContextManager["Planted"]):
    """One fault in this process, and in those that it starts.

    ``ledger``: the file in which other processes note that it fired there.
    """

    def __init__(self, fault: Fault, ledger: Path | None = None) -> None:
        self.fault = fault
        self.ledger = ledger
        self._fired = 0
        self._broken: AbstractContextManager[Any] | None = None

    @property
    def fired(self) -> int:
        """How often it has done its damage here, and in how many other processes it has."""
        elsewhere = self.ledger.stat().st_size if self.ledger and self.ledger.exists() else 0
        return self._fired + elsewhere

    def fire(self) -> None:
        """The fault has done its damage once more."""
        self._fired += 1

    def in_step(self, task: Task, step: TrainStep) -> TrainStep:
        """The step as the fault leaves it."""
        return self.fault.in_step(task, step, self.fire) if self.fault.in_step else step

    def __enter__(self) -> Planted:
        self._break()
        _here.append(self)
        return self

    def __exit__(self, *error: Any) -> None:
        _here.remove(self)
        self._mend()

    def _break(self) -> None:
        self._broken = self.fault.in_torch(self.fire)
        self._broken.__enter__()

    def _mend(self) -> None:
        assert self._broken is not None
        self._broken.__exit__(None, None, None)


_here: list[Planted] = []
"""What is planted in this process."""


@contextmanager
def intact() -> Iterator[None]:
    """Torch as it was, inside the block: what judges must not be broken itself."""
    planted_here = list(_here)
    for one in reversed(planted_here):
        one._mend()
    try:
        yield
    finally:
        for one in planted_here:
            one._break()


def plant(name: str) -> Planted:
    """The fault of this name, to be entered. Raises BadCase for an unknown one."""
    return Planted(fault_of(name))


def fault_of(name: str) -> Fault:
    """Raises BadCase for an unknown one."""
    from ddp_equivalence.faults import FAULTS

    if name not in FAULTS:
        raise BadCase("plant", name, f"one of {', '.join(FAULTS)}")
    return FAULTS[name]


@contextmanager
def planted(name: str) -> Iterator[Planted]:
    """Break training in a known way inside the block: which of your own tests notice?

    ``check`` and ``assert_equivalent`` plant it on their ranks. Everything else in this process
    that uses torch's DistributedDataParallel or torch.distributed is broken too, and so is every
    process that multiprocessing starts inside the block (``torch.multiprocessing.spawn`` as well).
    The value counts, as ``fired``, how often the damage was done: a test that passes though it was
    done has not noticed.

    Raises BadCase for an unknown name.
    """
    fault = fault_of(name)
    with tempfile.NamedTemporaryFile(prefix="ddp_equivalence-planted-") as file:
        found = Planted(fault, Path(file.name))
        with (
            settings.using(settings.replaced(plant=name)),
            patch.object(BaseProcess, "__init__", _planting(found, BaseProcess.__init__)),
            found,
        ):
            try:
                yield found
            finally:
                found._fired, found.ledger = found.fired, None


def _planting(found: Planted, initialise: Any) -> Any:
    def started(
        process: BaseProcess, group: None = None, target: Any = None, *more: Any, **named: Any
    ) -> None:
        # The suite's own ranks plant by themselves, and only around a step.
        ours = getattr(target, "__module__", "").startswith("ddp_equivalence.")
        if target is not None and not ours:
            target = InPlanted(found.fault.name, found.ledger, target)
        initialise(process, group, target, *more, **named)

    return started


class InPlanted:
    """A process's target, run with the fault planted."""

    def __init__(self, name: str, ledger: Path | None, target: Any) -> None:
        self._name, self._ledger, self._target = name, ledger, target

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        with plant(self._name) as found:
            try:
                return self._target(*arguments, **named)
            finally:
                if found.fired and self._ledger is not None:
                    with self._ledger.open("ab") as ledger:
                        ledger.write(b"!")
