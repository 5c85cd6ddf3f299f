"""How ranks failed: what every rank did, and the errors that say so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddp_equivalence.ranks.collectives import LastCollective


@dataclass(frozen=True)
class RankEnd:
    """How one rank ended its work: the entry that every rank gets, whatever happened.

    ``kind`` is ``finished``, ``exception``, ``signal``, ``exit``, ``running``, ``output`` (it wrote
    too much) or ``changed`` (it left its process changed); ``what`` one line; ``detail`` the
    traceback or stack; ``line`` the source line concerned; ``at`` seconds on the machine's
    monotonic clock; ``last`` its last collective, if it is known; ``waits`` True if it waited for
    other ranks in it.
    """

    rank: int
    node: int
    local_rank: int
    kind: str
    what: str = ""
    detail: str = ""
    line: str = ""
    at: float = 0.0
    output: str = ""
    last: LastCollective | None = None
    waits: bool = False

    @property
    def failed(self) -> bool:
        return self.kind != "finished"


class RankFailed(RuntimeError):
    """A rank raised, exited or was killed. ``.ends`` has one entry a rank, root cause first.

    ``.waiting`` says in a sentence who waited for whom; "" where nobody did or nobody knows.
    """

    def __init__(self, message: str, ends: Sequence[RankEnd] = (), waiting: str = "") -> None:
        self.ends, self.waiting = tuple(ends), waiting
        super().__init__(message)


class RanksTimedOut(RankFailed):
    """No answer within the deadline. ``.ends`` holds the stack of every rank still running."""
