"""Ranks that wait for each other: the report says who waits where for whom, and what to do, on one
screen without torch's internals; what it advises is judged.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from ddp_equivalence import check
from tests.package.own_cases import own_case
from tests.package.report import hangs as steps
from tests.package.report.test_ddp_errors import assert_short

CALLS = "Fix: let every rank call it, or none: move it out of what only some ranks run"
PASSES = "Fix: let all ranks make equally many forward and backward passes through DDP"
ORDER = "Fix: let all ranks call the same collectives in the same order"


def row(name: str, step: Any, *words: str, mended: Any = None, layout: str = "1x2") -> Any:
    return pytest.param(step, words, mended, layout, id=name)


ROWS = [
    row(
        "a loss that one rank logs",
        steps.logs((0,)),
        r"Rank 0 waits in all_reduce #5 of \(\) Double, for rank 1, which has finished.",
        r"> \S+:\d+ dist.all_reduce\(seen\) rank 0 waits here",
        CALLS,
        mended=steps.logs((0, 1)),
    ),
    row(
        "a loss that one rank logs before backward",
        steps.logs((0,), before_backward=True),
        "The ranks do not call the same collective.",
        r"dist.all_reduce\(seen\) rank 0 calls allreduce of \[\] Double",
        r"of_shard.backward\(\) rank 1 calls allreduce of \[66\] Double",
        ORDER,
        mended=steps.logs((0, 1), before_backward=True),
    ),
    row(
        "a barrier without one rank",
        steps.saves((0, 2)),
        "Ranks 0, 2 wait in barrier #5, for rank 1, which has finished.",
        r"> \S+:\d+ dist.barrier\(\) ranks? [02]",
        CALLS,
        mended=steps.saves((0, 1, 2)),
        layout="1x3",
    ),
    row(
        "fewer batches",
        steps.trains((3, 2)),
        r"Rank 0 waits in all_reduce #\d+ of \(66,\) Double, for rank 1, which has finished.",
        r"count\).backward\(\) rank 0 waits here",
        PASSES,
        mended=steps.trains((3, 3)),
    ),
    row(
        "a batch that one rank skips",
        steps.skips(1),
        r"Rank 0 waits in broadcast #\d+ of \(5,\) Int, for rank 1, which has finished.",
        r"2\).backward\(\) rank 0 waits here",
        PASSES,
        mended=steps.skips(None),
    ),
    row(
        "another order",
        steps.in_another_order(1),
        "The ranks do not call the same collective.",
        r"dist.broadcast\(torch.zeros\(1\), 0\) rank 0 (calls broadcast of \[1\] Float|waits here)",
        r"dist.barrier\(\) rank 1 (calls barrier|waits here)",
        ORDER,
        mended=steps.in_another_order(None),
    ),
    row(
        "all receive",
        steps.receives((0, 1)),
        "Ranks 0, 1 wait in recv, the same on all ranks. > ",
        r"> \S+:\d+ dist.recv\(torch.zeros\(1\), 1 - rank.rank\) ranks 0, 1 wait here",
        "Fix: let every recv meet a send of the other rank",
        mended=steps.receives((0,)),
    ),
    row(
        "one raises in front of backward",
        steps.raises_in_front_of("backward"),
        r"Rank 0 waits in all_reduce #4 of \(66,\) Double, for rank 1, which raised OSError: disk",
        r"Root cause: rank 1 \(node 0, local rank 1\) OSError: disk is full > ",
        r"of_shard.backward\(\) rank 0 waits here",
    ),
    row(
        "one raises in front of a barrier",
        steps.raises_in_front_of("barrier"),
        "Ranks 0, 2 wait in barrier #4, for rank 1, which raised OSError: disk is full.",
        r"dist.barrier\(\) ranks 0, 2 wait here",
        layout="1x3",
    ),
    row(
        "one raises in front of a recv",
        steps.raises_in_front_of("recv"),
        "Rank 0 waits in recv, for rank 1, which raised OSError: disk is full.",
        r"dist.recv\(torch.zeros\(1\), 1\) rank 0 waits here",
    ),
    row(
        "one does something else",
        steps.sleeps,
        r"Ranks 0, 2 wait in all_reduce #4 of \(66,\) Double, for rank 1, which is at hangs.py",
        r"Root cause: rank 1 \(node 0, local rank 1\) still running > \S+:\d+ time.sleep\(1000\)",
        r"loss\(ddp, shard\).backward\(\) ranks 0, 2 wait here",
        layout="1x3",
    ),
]


@pytest.mark.parametrize(("step", "words", "mended", "layout"), ROWS)
def test_the_report_says_who_waits_where_for_whom_and_what_mends_it(
    step: Any, words: tuple[str, ...], mended: Any, layout: str
) -> None:
    verdict = check(own_case(layout=layout), step, deadline=12.0, collective_deadline=6.0)
    report = str(verdict)
    assert verdict.outcome == "unknown"
    assert_short(report)
    joined = " ".join(report.split())
    assert [one for one in words if re.search(one, joined) is None] == [], report
    assert ("Fix: " in report) == (mended is not None), report
    if mended is not None:
        assert check(own_case(layout=layout), mended).outcome == "same"
