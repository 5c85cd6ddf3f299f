"""Evidence that nn.DataParallel really made replicas: the devices on which they were called."""

from __future__ import annotations

from typing import Any

from torch import nn

from ddp_equivalence.case.batch_tree import tensors_of
from ddp_equivalence.strategies.strategy import Task


class Replicas:
    """Hears every replica of the task's model, from now on."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._devices: set[str] = set()
        # Replicas share the module's hooks, so each replica that is called adds its own device.
        task.model.register_forward_pre_hook(self._add, with_kwargs=True)

    def forget(self) -> None:
        """Forget the replicas of the last step."""
        self._devices.clear()

    def note(self) -> None:
        """Write into the task's notes how many replicas were called, and on which devices."""
        self._task.notes["replicas"] = len(self._devices)
        self._task.notes["devices"] = sorted(self._devices)

    def _add(self, module: nn.Module, *arguments: Any) -> None:
        self._devices.update(str(leaf.device) for leaf in tensors_of(arguments))
