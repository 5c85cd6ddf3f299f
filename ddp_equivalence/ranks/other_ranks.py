"""Collects the results of all other ranks in a thread, while rank 0 works in this process."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any

from ddp_equivalence.ranks.deadline import Deadline
from ddp_equivalence.ranks.failure import RankFailed

FAILURE_TIMEOUT = 10.0
"""Seconds in which the thread has found out why rank 0 lost its connection, if a rank failed."""

KILL_TIMEOUT = 10.0
"""Seconds in which the thread ends after the ranks were killed."""


class OtherRanks:
    """The thread begins at once. Another rank that fails ends the other ranks, as in every set.

    ``collect``: yields the results of the other ranks. While rank 0 works it has no deadline.
    """

    def __init__(self, collect: Callable[[Deadline], Iterator[tuple[int, Any]]]) -> None:
        self.deadline = Deadline(math.inf, "while rank 0 worked")
        self._results: SimpleQueue[tuple[int, Any] | None] = SimpleQueue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._listen, args=(collect,), daemon=True)
        self._thread.start()

    def have_finished(self) -> bool:
        """True if all other ranks have finished their work."""
        return not self._thread.is_alive() and self._error is None

    def collect(self, seconds: float) -> Iterator[tuple[int, Any]]:
        """Yield their results. They get so many seconds from now, since rank 0 has finished."""
        after = Deadline.after(seconds)
        self.deadline.within, self.deadline.until = after.within, after.until
        while (result := self._results.get()) is not None:
            yield result
        if self._error is not None:
            raise self._error

    def failure(self) -> RankFailed | None:
        """The failure of another rank that explains why rank 0 has lost its connection."""
        self._thread.join(0 if self.have_finished() else FAILURE_TIMEOUT)
        return self._error if isinstance(self._error, RankFailed) else None

    def wait_until_killed(self) -> None:
        """Wait until the thread has noticed that its ranks are gone."""
        self._thread.join(KILL_TIMEOUT)

    def _listen(self, collect: Callable[[Deadline], Iterator[tuple[int, Any]]]) -> None:
        try:
            for result in collect(self.deadline):
                self._results.put(result)
        except BaseException as error:  # the thread of rank 0 raises it
            self._error = error
        finally:
            self._results.put(None)
