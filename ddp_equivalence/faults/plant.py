"""Plant a fault: on the suite's ranks, in this process, and in processes that this one starts."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from ddp_equivalence.case import settings
from ddp_equivalence.case.errors import BadCase, one_of
from ddp_equivalence.faults.fault import Fault

if TYPE_CHECKING:
    from ddp_equivalence.strategies.strategy import Task, TrainStep


class PlantedFault(AbstractContextManager["PlantedFault"]):
    """A fault that breaks this process while the block lasts, and counts how often it fired.

    Every other process in which the same fault fires adds one byte to the file
    ``fired_elsewhere``.
    """

    def __init__(self, fault: Fault, fired_elsewhere: Path | None = None) -> None:
        self.fault = fault
        self.fired_elsewhere = fired_elsewhere
        self._fired_here = 0
        self._broken_torch: AbstractContextManager[Any] | None = None

    @property
    def fired(self) -> int:
        """The times that the fault fired here, plus the number of other processes it fired in."""
        path = self.fired_elsewhere
        return self._fired_here + (path.stat().st_size if path and path.exists() else 0)

    def record_firing(self) -> None:
        """Count that the fault has done its damage once more in this process."""
        self._fired_here += 1

    def keep_count(self) -> None:
        """Keep the count as it is now, so that the file can be removed."""
        self._fired_here, self.fired_elsewhere = self.fired, None

    def break_step(self, task: Task, step: TrainStep) -> TrainStep:
        """The train step with the fault in it; the step itself if the fault lies in torch."""
        if self.fault.break_step is None:
            return step
        return self.fault.break_step(task, step, self.record_firing)

    def break_torch(self) -> None:
        """Break torch in this process."""
        self._broken_torch = self.fault.break_torch(self.record_firing)
        self._broken_torch.__enter__()

    @property
    def breaks_torch_now(self) -> bool:
        return self._broken_torch is not None

    def mend_torch(self) -> None:
        """Undo ``break_torch``."""
        assert self._broken_torch is not None
        self._broken_torch.__exit__(None, None, None)
        self._broken_torch = None

    def __enter__(self) -> PlantedFault:
        self.break_torch()
        _planted_here.append(self)
        return self

    def __exit__(self, *error: Any) -> None:
        _planted_here.remove(self)
        self.mend_torch()


_planted_here: list[PlantedFault] = []
"""The faults that are planted in this process."""


@contextmanager
def without_planted_faults() -> Iterator[None]:
    """Inside the block, torch is intact: the code that judges must not be broken itself.

    Blocks may be nested.
    """
    faults = [fault for fault in _planted_here if fault.breaks_torch_now]
    for fault in reversed(faults):
        fault.mend_torch()
    try:
        yield
    finally:
        for fault in faults:
            fault.break_torch()


def fault_named(name: str) -> Fault:
    """The fault of this name. Raises BadCase for an unknown name."""
    from ddp_equivalence.faults import FAULTS

    if name not in FAULTS:
        raise BadCase("plant", name, one_of(FAULTS, name))
    return FAULTS[name]


def plant_here(name: str) -> PlantedFault:
    """A context manager that plants a fault in this process only.

    Raises BadCase for an unknown name.
    """
    return PlantedFault(fault_named(name))


@contextmanager
def planted(name: str) -> Iterator[PlantedFault]:
    """Break training in a known way inside the block, to see which of your own tests notice.

    ``check`` and ``assert_equivalent`` plant the fault on their ranks. All other code in this
    process that uses torch's DistributedDataParallel or torch.distributed is broken too, and so is
    every process that multiprocessing starts inside the block, also through
    ``torch.multiprocessing.spawn``.

    In ``with planted(name) as fault``, ``fault.fired`` counts how often the fault did its damage. A
    test that passes although the fault fired has not noticed it.

    Raises BadCase for an unknown name.
    """
    fault = fault_named(name)
    with tempfile.NamedTemporaryFile(prefix="ddp_equivalence-planted-") as file:
        planted_fault = PlantedFault(fault, Path(file.name))
        initialise = _plant_in_new_processes(planted_fault, BaseProcess.__init__)
        with (
            settings.using(settings.replaced(plant=name)),
            patch.object(BaseProcess, "__init__", initialise),
            planted_fault,
        ):
            try:
                yield planted_fault
            finally:
                planted_fault.keep_count()


def _plant_in_new_processes(planted_fault: PlantedFault, initialise: Any) -> Any:
    """``BaseProcess.__init__`` for processes whose target is to run with the fault planted."""

    def initialise_broken(
        process: BaseProcess, group: None = None, target: Any = None, *more: Any, **named: Any
    ) -> None:
        # The suite's own ranks plant the fault themselves, and only around a step.
        is_own = getattr(target, "__module__", "").startswith("ddp_equivalence.")
        if target is not None and not is_own:
            name, fired_elsewhere = planted_fault.fault.name, planted_fault.fired_elsewhere
            target = TargetWithFault(name, fired_elsewhere, target)
        initialise(process, group, target, *more, **named)

    return initialise_broken


class TargetWithFault:
    """The target of a new process, run with a fault planted.

    If the fault fired, the process adds one byte to the file ``fired_elsewhere``.
    """

    def __init__(self, name: str, fired_elsewhere: Path | None, target: Any) -> None:
        self._name, self._fired_elsewhere, self._target = name, fired_elsewhere, target

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        with plant_here(self._name) as planted_fault:
            try:
                return self._target(*arguments, **named)
            finally:
                if planted_fault.fired and self._fired_elsewhere is not None:
                    with self._fired_elsewhere.open("ab") as file:
                        file.write(b"!")
