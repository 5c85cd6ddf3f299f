"""The errors raised when ranks fail, and the record of how each rank ended its work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddp_equivalence.ranks.collectives import LastCollective
    from ddp_equivalence.ranks.ddp_errors import DdpError


@dataclass(frozen=True)
class RankEnd:
    """How one rank ended its work. After a failure there is one for every rank.

    ``kind`` is one of:

    - ``finished``: the rank finished its work;
    - ``exception``: it raised;
    - ``signal``: a signal killed it;
    - ``exit``: its process ended;
    - ``running``: it was still running at the deadline;
    - ``output``: it wrote too much output;
    - ``changed``: it finished but left its process changed.

    ``what`` says in a few words how the rank ended. ``detail`` is the traceback or the stack.
    ``line`` is the source line at which the rank ended or still was. ``at`` is the time in seconds
    of the machine's monotonic clock. ``output`` is what the rank printed. ``last`` is its last
    collective, if known. ``waits`` is True if the rank was waiting for other ranks in that
    collective. ``signal_number`` is the signal that killed it, 0 if none did. ``about`` is what an
    error of DistributedDataParallel (DDP) is about.
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
    signal_number: int = 0
    about: DdpError | None = None

    @property
    def failed(self) -> bool:
        return self.kind != "finished"


class RankFailed(RuntimeError):
    """A rank raised, exited or was killed.

    ``ends`` holds one RankEnd per rank, the root cause first. ``waiting`` is a sentence that says
    which ranks waited for which; it is "" if none waited or if that is not known. ``may_pass_now``:
    idle ranks held what these lacked on a GPU, and have been stopped since. ``libraries``: those
    that earlier work had imported on the ranks.
    """

    may_pass_now = False
    libraries: tuple[str, ...] = ()

    def __init__(self, message: str, ends: Sequence[RankEnd] = (), waiting: str = "") -> None:
        self.ends, self.waiting = tuple(ends), waiting
        super().__init__(message)


class RanksTimedOut(RankFailed):
    """Ranks did not answer before the deadline.

    ``ends`` holds the stack of every rank that was still running.
    """
