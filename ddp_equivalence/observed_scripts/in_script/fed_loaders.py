"""The loaders through which a script gets the rows of the record, and how long their epochs are."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from ddp_equivalence.observed_scripts.in_script.asked_queries import AskedQueries
from ddp_equivalence.observed_scripts.in_script.loaders import Loaders
from ddp_equivalence.observed_scripts.recorded_step import (
    Epoch,
    StepReader,
    loaders_of_training,
    rank_folder,
)
from ddp_equivalence.observed_scripts.told import Told


class FedLoaders:
    """``loaders``: those of this process, which iterates over the same ones as the ranks did.
    ``batches``: how many each has yielded by now, by its number.
    """

    def __init__(self, told: Told, loaders: Loaders, asked: AskedQueries) -> None:
        self._told, self._loaders, self._asked = told, loaders, asked
        self.batches: dict[int, int] = {}
        self._has_told = False

    @cached_property
    def in_order(self) -> tuple[int, ...]:
        """Those with which rank 0 trained."""
        return loaders_of_training(self._told.folder)

    @cached_property
    def _epoch(self) -> Epoch:
        """Of the first of them, on rank 0."""
        return StepReader(rank_folder(self._told.folder, 0), 0).step.epoch

    def is_fed(self, loader: int) -> bool:
        """The loader with this number yields rows of the record."""
        return self._told.feed == "loader" and loader in self.in_order

    def next_batch(self, loader: int) -> int:
        """The number of the batch that a loader yields now, among all that it does."""
        batch = self.batches.get(loader, 0)
        self.batches[loader] = batch + 1
        return batch

    def length_of(self, loader: Any, batches: int) -> int:
        """How many batches a loader is said to have: as many as on the ranks, since a loss may
        depend on it, or as many as an epoch has that a query has to itself.
        """
        if self._told.feed != "loader":
            return batches
        number = self._loaders.number_of(loader)
        made = self._loaders.made_as(loader)
        if number is None and made is not None and made == self._epoch.made:
            number = self.in_order[0]  # it is asked before its first epoch
        if number is None or not self.is_fed(number):
            return batches
        if number == self.in_order[0] and self._epoch.batches:
            self._has_told, batches = True, self._epoch.batches
        return self._asked.batches_of_epoch(self.batches.get(number, 0)) or batches

    def ends_epoch(self, loader: int, first: int) -> bool:
        """The epoch that began with the batch ``first`` has no more batches for the script. It goes
        on as long as there are queries, unless the script does something else in its middle.
        """
        batch = self.batches.get(loader, 0)
        if batch == first or not self.is_fed(loader) or loader != self.in_order[0]:
            return False
        in_query = self._has_told and self._asked.crosses(first + self._epoch.batches, batch)
        return in_query or self._asked.ends_epoch_before(batch)
