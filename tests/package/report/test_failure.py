"""The report of ranks that failed: what several ranks share is printed once."""

from __future__ import annotations

from typing import Any

from torch import nn

from ddp_equivalence import Rank, check
from ddp_equivalence.ranks.failure import RankEnd, RankFailed
from ddp_equivalence.report.failure import failure_blocks
from tests.package.own_cases import own_case


def text_of(*ends: RankEnd) -> str:
    blocks = failure_blocks(RankFailed("a rank failed", ends), "a rank failed", None)
    return "\n".join(line.text for block in blocks for line in block)


def raised(rank: int, what: str = "ValueError: oh", line: str = "mine.py:3: raise") -> RankEnd:
    detail = f"Traceback (most recent call last):\n{what}"
    return RankEnd(rank, rank // 2, rank % 2, "exception", what, detail, line)


def test_an_error_that_all_ranks_share_is_printed_once() -> None:
    text = text_of(*map(raised, (2, 0, 3, 1)))
    assert text.count("ValueError: oh") == 2, "once as the cause, once in its traceback"
    assert "Root cause: rank 0 (node 0, local rank 0) ValueError: oh" in text
    assert text.endswith("  Ranks 1, 2, 3 raised the same.")
    assert "Then" not in text


def test_one_other_rank_is_named_in_the_singular() -> None:
    assert "  Rank 1 raised the same." in text_of(raised(0), raised(1))


def test_consequences_that_are_the_same_are_printed_once_too() -> None:
    lost = [raised(rank, "RuntimeError: Connection closed by peer", "b.py:1: x") for rank in (2, 3)]
    text = text_of(raised(1), lost[1], raised(0, "KeyError: 'a'"), lost[0])
    assert "Root cause: rank 1 (node 0, local rank 1) ValueError: oh" in text
    assert "Then: rank 2 (node 1, local rank 0) RuntimeError: Connection closed" in text
    assert "  Rank 3 raised the same." in text
    assert "Then: rank 0 (node 0, local rank 0) KeyError: 'a'" in text
    assert text.count("Then:") == 2


def test_the_same_error_at_another_line_is_another_error() -> None:
    text = text_of(raised(0), raised(1, line="mine.py:9: raise"))
    assert "Then: rank 1 (node 0, local rank 1) ValueError: oh" in text
    assert "the same" not in text


def test_an_error_with_the_number_of_each_rank_is_printed_once() -> None:
    text = text_of(*(raised(rank, f"ValueError: rank {rank}: oh -1.5e-{rank}") for rank in (1, 0)))
    assert text.count("oh") == 2, "once as the cause, once in its traceback"
    assert text.endswith("  Rank 1 raised the same, with other numbers.")


def test_ranks_that_end_alike_without_an_error_share_an_entry() -> None:
    killed = [
        RankEnd(rank, 0, rank, "signal", "killed by SIGKILL", signal_number=9) for rank in range(3)
    ]
    text = text_of(*killed)
    assert "Root cause: rank 0 (node 0, local rank 0) killed by SIGKILL" in text
    assert "  The same is true of ranks 1, 2." in text


def test_more_ranks_than_are_shown_are_counted() -> None:
    text = text_of(*(raised(rank, f"ValueError: {chr(65 + rank // 2)}") for rank in range(20)))
    assert text.count("Then: rank") == 7
    assert "  Then: 4 more ranks" in text


def every_rank_fails(model: nn.Module, shard: Any, rank: Rank) -> None:
    print("about to fail")
    raise ValueError("no such column: age")


def test_a_step_that_fails_on_every_rank_has_one_error_and_one_output() -> None:
    text = str(check(own_case(layout="2x2"), every_rank_fails))
    assert "Root cause: rank 0 (node 0, local rank 0) ValueError: no such column: age" in text
    assert "  Ranks 1, 2, 3 raised the same." in text
    assert text.count("about to fail") == 1
    assert "  Output of ranks 0, 1, 2, 3" in text


def test_a_traceback_begins_at_the_users_code() -> None:
    def fails(model: nn.Module, shard: Any, rank: Rank) -> None:
        raise LookupError("no such column")

    text = str(check(own_case(), fails))
    traceback = text[text.index("Traceback") : text.index("Evidence:")]
    assert traceback.count("  File ") == 1
    assert "in fails" in traceback
