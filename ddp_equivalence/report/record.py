"""The record of each check of a run: who is told of its verdict, whether somebody has read it, and
plain data for the closing table and for JSON. It imports no torch until it is asked for versions.
"""

from __future__ import annotations

import math
import platform
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddp_equivalence.measurement.request import Request
    from ddp_equivalence.report.verdict import Verdict

    Listener = Callable[[Verdict, Request | None], None]
    """Gets the verdict, and the request that it answers; None for a step of an observed script."""


# Who is told of a verdict, and who has read it.

READING = "_reading"
"""The attribute of a verdict that holds its Reading. It is no field: a copy shares it."""


@dataclass
class Reading:
    """One check as messages name it, and whether anybody has read its verdict.

    ``file`` and ``line``: where ``check`` was called. ``done``: something that the check found out
    was read from the verdict, or from a copy of it. ``can_be_read``: somebody has kept the verdict.
    """

    subject: str
    outcome: str
    file: str
    line: int
    done: bool = False
    can_be_read: bool = True


_listeners: list[Listener] = []

_watched: list[list[Reading]] = []
"""The lists of all ``watched`` blocks that are running, the innermost last."""


@contextmanager
def _while_listed(one: Any, listed: list[Any]) -> Iterator[Any]:
    listed.append(one)
    try:
        yield one
    finally:
        listed[:] = [other for other in listed if other is not one]


def listening(listener: Listener) -> AbstractContextManager[Listener]:
    """Call ``listener`` with every verdict that is reached inside the block."""
    return _while_listed(listener, _listeners)


def watched() -> AbstractContextManager[list[Reading]]:
    """Collect the readings of what ``check`` returns in the block, but not in a block inside it."""
    return _while_listed([], _watched)


def tell(verdict: Verdict, request: Request | None) -> None:
    """Pass a verdict on to all listeners."""
    for listener in _listeners:
        listener(verdict, request)


def begin(verdict: Verdict) -> None:
    """Note from now on whether the verdict is read. ``check`` calls this last."""
    if not _watched:
        return
    from ddp_equivalence.ranks.users_line import users_place

    file, line, _ = users_place(sys._getframe(1))
    reading = Reading(verdict.subject, verdict.outcome, file, line)
    weakref.finalize(verdict, setattr, reading, "can_be_read", False)
    _watched[-1].append(reading)
    verdict.__dict__[READING] = reading


# One check as plain data.


@dataclass(frozen=True)
class Record:
    """One check. The fields are those of a case in the JSON results.

    ``id``: the test. ``backend``: the lane. ``expected``: the outcome that the test asks for.
    ``causes``: the accepted cause and all that cannot be told apart from it. ``error``, ``floor``
    and ``limit``: of the worst parameter, None where not finite or not measured. ``reason`` and
    ``unknown_because``: why nothing was shown, in words and as a value of ``UnknownBecause``.
    ``parameters``, ``elements``, ``ranks``: how much was compared. ``planted``: the fault that was
    planted on purpose, or "". ``known``: the case is known to differ. ``confirmed``: its test found
    that it differs in the known way. ``gpu``: the physical GPUs of all ranks in their order, with
    ", " between ranks; "" on the CPU.

    ``repairs``: the edits of the step with which every rank was seen to hold the gradients of the
    big batch, the most likely first: each with its ``file`` and ``line``, and the ``change`` in
    words, such as "with `a` in place of `b`".

    ``digests``: of the gradients of each rank, in their order, and ``details``, of an outcome that
    the test does not expect: only in a run that is recorded.

    ``report``, ``full_report``, ``headline`` (the first line of the report), ``file`` and ``line``
    (of the code to look at): only where the outcome is not "same", and only in a run that asks for
    them.
    """

    id: str
    strategy: str
    layout: str
    backend: str
    dtype: str
    expected: str
    outcome: str
    cause: str | None
    causes: tuple[str, ...]
    error: float | None
    floor: float | None
    limit: float | None
    seconds: float
    reason: str
    unknown_because: str | None
    lane_reason: str
    parameters: int
    elements: int
    ranks: int
    planted: str = ""
    known: bool = False
    confirmed: bool = False
    gpu: str = ""
    repairs: tuple[Mapping[str, str | int], ...] = ()
    digests: tuple[str, ...] = ()
    details: Mapping[str, Any] | None = None
    report: str = ""
    full_report: str = ""
    headline: str = ""
    file: str = ""
    line: int = 0

    @property
    def was_compared(self) -> bool:
        """True if the check reached a verdict, on a step that was not broken on purpose."""
        return not self.planted and self.outcome in ("same", "different")


def record_of(
    verdict: Verdict,
    test_id: str,
    expected: str,
    planted: str,
    with_floor: bool,
    with_report: bool = False,
    for_a_record: bool = False,
) -> Record:
    """The record of one verdict. Errors that are not finite become None, since JSON has none.

    ``with_floor``: include the rounding floor, which may have to be measured first.
    ``with_report``: include the texts of a verdict that is not "same". ``for_a_record``: include
    digests and details.
    """
    comparison = verdict.comparison
    texts: dict[str, Any] = {}
    if with_report and verdict.outcome != "same":
        from ddp_equivalence.report.render import headline_text, line_to_look_at

        texts = {"report": str(verdict), "full_report": verdict.full_report()}
        texts["headline"] = headline_text(verdict)
        if (line := line_to_look_at(verdict)) is not None:
            texts |= {"file": line.file, "line": line.number}
    return Record(
        id=test_id,
        strategy=verdict.subject,
        layout=verdict.case.layout,
        backend=verdict.lane.name,
        dtype=verdict.case.dtype_name,
        expected=expected,
        outcome=verdict.outcome,
        cause=verdict.cause,
        causes=tuple(
            name for finding in verdict.findings if finding.accepted for name in finding.causes
        ),
        error=finite(verdict.error),
        floor=finite(verdict.floor) if with_floor else None,
        limit=finite(verdict.limit),
        seconds=round(verdict.seconds, 4),
        reason=verdict.reason,
        unknown_because=verdict.unknown_because and verdict.unknown_because.value,
        lane_reason=verdict.lane.reason,
        parameters=len(comparison.parameters) if comparison else 0,
        elements=comparison.elements if comparison else 0,
        ranks=len(comparison.ranks) if comparison else 0,
        planted=planted,
        gpu=", ".join(one.gpu for one in verdict.evidence.values() if one.gpu),
        repairs=tuple(
            {"file": one.line.file, "line": one.line.number, "change": one.text}
            for one in verdict.repairs.found
        ),
        digests=tuple(comparison.digests.values()) if comparison and for_a_record else (),
        details=_details_of(verdict) if for_a_record and verdict.outcome != expected else None,
        **texts,
    )


def finite(number: float | None) -> float | None:
    """The number; None if it is not finite, since JSON has no other ones."""
    return number if number is not None and math.isfinite(number) else None


# What a page shows of a check that did not come out as its test expects.

MOST_PARAMETERS = 400
MOST_SHARES = 4_096
LONGEST_REPORT = 8_000


def _details_of(verdict: Verdict) -> dict[str, Any]:
    """``report``: the short one. ``shares``: how often each example, or each rank's examples,
    entered what every rank holds, with the name of what could be told apart. ``parameters``: name,
    error, rounding floor and limit of each, in the order in which backward reaches them.
    """
    is_explained = verdict.findings or not verdict.asked.of_script
    report = "Only the first step of a script that differs is explained."
    if is_explained or verdict.outcome != "different":
        report = str(verdict)
    shares, comparison = verdict.shares, verdict.comparison
    rows, pieces = None if shares is None else shares.by_rank, "ranks"
    by_example = None if shares is None else shares.by_example
    if by_example is not None and sum(map(len, by_example.values())) <= MOST_SHARES:
        rows, pieces = by_example, "examples"
    shown = () if comparison is None else comparison.parameters[-MOST_PARAMETERS:]
    return {
        "report": report[:LONGEST_REPORT],
        "shares": rows
        and {
            "pieces": pieces,
            "ranks": list(rows),
            "rows": [list(map(_rounded, row)) for row in rows.values()],
        },
        "parameters": [
            [one.name, *map(_rounded, (one.error, one.limit.floor, one.limit.relative))]
            for one in reversed(shown)
        ],
    }


def _rounded(value: float | None) -> float | None:
    return float(f"{value:.4g}") if value is not None and math.isfinite(value) else None


# Versions of the software, and the machine, that the results depend on.


def versions() -> Mapping[str, Any]:
    """The entry ``environment`` of the JSON results; the doctor prints it too."""
    import torch

    from ddp_equivalence.ranks.lanes import cuda_devices

    try:
        own = metadata.version("ddp_equivalence")
    except metadata.PackageNotFoundError:
        own = "checkout"  # the package was never installed
    nccl = torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else None
    return {
        "ddp_equivalence": own,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, nccl)) if nccl else None,
        "cuda_devices": len(cuda_devices()),
    }
