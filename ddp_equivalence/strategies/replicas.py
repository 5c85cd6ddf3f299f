"""Evidence that nn.DataParallel really made replicas: the devices on which they were called."""

from __future__ import annotations

from typing import Any

from torch import nn

from ddp_equivalence.case.batch_tree import tensors_of
from ddp_equivalence.strategies.strategy import Task


class Replicas:
    """Hears every replica of the task's model that the wrapper ``parallel`` calls, from now on."""

    def __init__(self, task: Task, parallel: nn.DataParallel[nn.Module]) -> None:
        self._task = task
        self._calls: list[list[set[str]]] = []
        # Replicas share the module's hooks, so each replica that is called adds its own devices.
        parallel.register_forward_pre_hook(lambda *_: self._calls.append([]))
        task.model.register_forward_pre_hook(self._add, with_kwargs=True)

    def forget(self) -> None:
        """Forget the replicas of the last step."""
        self._calls.clear()

    def note(self) -> None:
        """Write into the task's notes how many replicas were called, and on which devices.

        Several may be on one device. A loss may call the wrapper several times, so that the fewest
        replicas of one call count.
        """
        self._task.notes["replicas"] = min(map(len, self._calls), default=0)
        self._task.notes["devices"] = sorted(
            set().union(*(one for ones in self._calls for one in ones))
        )

    def _add(self, module: nn.Module, *arguments: Any) -> None:
        if self._calls:
            self._calls[-1].append({str(leaf.device) for leaf in tensors_of(arguments)})
