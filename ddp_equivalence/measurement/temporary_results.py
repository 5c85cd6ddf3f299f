"""Notices collectives whose result nobody can use, since nothing holds it once the line has run."""

from __future__ import annotations

from types import FrameType

from torch.multiprocessing.reductions import StorageWeakRef

from ddp_equivalence.measurement.code_lines import is_users
from ddp_equivalence.ranks.issued_collectives import Issued

IN_PLACE = frozenset({"all_reduce", "broadcast", "reduce"})
"""The collectives that write their result to the tensor that goes in."""


class TemporaryResults:
    """``waiting``: true while a line has issued a collective and has not ended.

    The memory of a tensor is what is watched: a view of a tensor may go away, and its memory stay.
    """

    def __init__(self) -> None:
        self._issued: dict[int, list[tuple[int, tuple[StorageWeakRef, ...]]]] = {}
        """id of the frame that issued them -> the numbers of the calls, and what they write to."""

    @property
    def waiting(self) -> bool:
        return bool(self._issued)

    def add(self, issued: Issued, frame: FrameType | None) -> None:
        """This collective is issued by the innermost of the user's lines in these frames."""
        while frame is not None and not is_users(frame.f_code.co_filename):
            frame = frame.f_back
        if frame is None or issued.op not in IN_PLACE or issued.asynchronous:
            return
        memory = tuple(StorageWeakRef(one.untyped_storage()) for one in issued.tensors)
        self._issued.setdefault(id(frame), []).append((issued.call, memory))

    def gone_after(self, frame: FrameType) -> list[int]:
        """A line of this frame has ended: the calls it made whose results nothing holds now."""
        of_frame = self._issued.pop(id(frame), [])
        return [call for call, memory in of_frame if all(one.expired() for one in memory)]
