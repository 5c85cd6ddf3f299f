"""The queries that a replay computes, and which batches of a loader belong to each."""

from __future__ import annotations

from ddp_equivalence.observed_scripts.query import Query
from ddp_equivalence.observed_scripts.question_line import QuestionLine, end_process


class AskedQueries:
    """``line``: where they come from. A batch has its number among all that its loader yielded."""

    def __init__(self, line: QuestionLine) -> None:
        self._line = line
        self._begun: list[Query] = []

    def query(self, number: int) -> Query:
        """The query with this number, in the order in which they are computed."""
        while len(self._begun) <= number:
            query = self._line.next_query()
            if query is None:
                end_process()
            self._begun.append(query)
        return self._begun[number]

    def replace_last(self, query: Query) -> None:
        """Compute this one instead of the last that came."""
        self._begun[-1] = query

    @property
    def now(self) -> Query:
        """The first that is not answered yet."""
        return self.query(self._line.answered)

    def of_batch(self, batch: int) -> tuple[Query, int]:
        """The query to which a batch belongs, and its place there."""
        number, place = self._place_of(batch)
        return self.query(number), place

    def ends_epoch_before(self, batch: int) -> bool:
        """An epoch ends before this batch: the query before it, or its own, has one to itself."""
        before, place = self.of_batch(batch - 1)
        if before.is_epoch and place == len(before.micro_batches) - 1:
            return True
        after, place = self.of_batch(batch)
        return after.is_epoch and place == 0

    def crosses(self, end: int, batch: int) -> bool:
        """With this batch, a query begins that has batches before and after the one at ``end``."""
        query, place = self.of_batch(batch)
        return place == 0 and batch < end < batch + len(query.micro_batches)

    def batches_of_epoch(self, batch: int) -> int | None:
        """How many batches the epoch has to which the last batch before this one belongs, if its
        query is not answered yet; otherwise the next epoch. None if no query has it to itself.
        """
        last = self._place_of(batch - 1)[0] if batch else -1
        is_answered = last < self._line.answered
        query = self.query(self._place_of(batch)[0] if is_answered else last)
        return len(query.micro_batches) if query.is_epoch else None

    def _place_of(self, batch: int) -> tuple[int, int]:
        """The number of the query to which a batch belongs, and its place there."""
        first, number = 0, 0
        while batch >= first + len(self.query(number).micro_batches):
            first += len(self.query(number).micro_batches)
            number += 1
        return number, batch - first
