"""The loaders through which a script gets the rows of the record, and how long their epochs are."""

from __future__ import annotations

from functools import cache, cached_property
from typing import Any

from ddp_equivalence.observed_scripts.in_script.asked_queries import AskedQueries
from ddp_equivalence.observed_scripts.in_script.loaders import Loaders
from ddp_equivalence.observed_scripts.query import Query
from ddp_equivalence.observed_scripts.recorded_step import (
    Epoch,
    StepReader,
    loaders_of_training,
    rank_folder,
)
from ddp_equivalence.observed_scripts.told import Told


class FedLoaders:
    """``loaders``: those of this process, which iterates over the same ones as the ranks did.
    ``batches``: the number of the batch that each yields next, by the number of the loader.
    """

    def __init__(self, told: Told, loaders: Loaders, asked: AskedQueries) -> None:
        self._told, self._loaders, self._asked = told, loaders, asked
        self.batches: dict[int, int] = {}
        self._has_told = False
        self._fed = set[bool]()

    @cached_property
    def in_order(self) -> tuple[int, ...]:
        """Those with which rank 0 trained."""
        return loaders_of_training(self._told.folder)

    @cached_property
    def _epoch(self) -> Epoch:
        """Of the first of them, on rank 0."""
        return StepReader(rank_folder(self._told.folder, 0), 0).step.epoch

    def is_fed(self, loader: int) -> bool:
        """The loader with this number yields rows of the query that is computed now."""
        return self._trains(loader) and self._has(self._asked.now, loader)

    def feeds(self, loader: int) -> bool:
        """The same, of a batch that it is about to yield for the step in progress."""
        is_fed = self.is_fed(loader)
        if self._trains(loader):
            self._fed.add(is_fed)
        return is_fed

    @property
    def is_of_other_phase(self) -> bool:
        """The step in progress is of a phase that has another loader than that of the query."""
        return self._fed == {False}

    def was_of_other_phase(self) -> bool:
        """``is_of_other_phase``, of the step that ends here."""
        is_other, self._fed = self.is_of_other_phase, set()
        return is_other

    def _trains(self, loader: int) -> bool:
        return self._told.feed == "loader" and loader in self.in_order

    def _has(self, query: Query, loader: int) -> bool:
        read = _loaders_of(self._told.folder, query.ranks[0], query.steps)
        return self.in_order.index(loader) in read

    def next_batch(self, loader: int) -> int:
        """The number of the batch that a loader yields now, among those of all queries."""
        batch = self.batches.get(loader, 0)
        while not self._has(query := self._asked.of_batch(batch)[0], loader):
            batch += len(query.micro_batches)
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


@cache
def _loaders_of(folder: str, rank: int, steps: tuple[int, ...]) -> frozenset[int]:
    """Those that a rank read from in these steps, numbered in the order of their training."""
    read = (StepReader(rank_folder(folder, rank), step).step.batches for step in steps)
    return frozenset(loader for batches in read for loader, _ in batches)
