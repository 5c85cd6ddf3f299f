"""Adds what the ranks printed to the test's report; pytest shows it if the test fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from ddp_equivalence.report import listeners
from ddp_equivalence.report.wrapping import rank_names

if TYPE_CHECKING:
    from ddp_equivalence.measurement.request import Request
    from ddp_equivalence.report.verdict import Verdict


@contextmanager
def added_to_report(item: pytest.Item) -> Iterator[None]:
    """Add what ranks printed in the checks of the block. Ranks that printed the same share it."""

    def add_sections(verdict: Verdict, request: Request | None) -> None:
        ranks_by_output: dict[str, list[int]] = {}
        for rank, text in sorted(verdict.output.items()):
            if text.strip():
                ranks_by_output.setdefault(text, []).append(rank)
        for text, ranks in ranks_by_output.items():
            title = f"output of {rank_names(ranks)}"
            if len(ranks) == 1:
                title += f" (node {verdict.case.ranks.rows[ranks[0]].node})"
            item.add_report_section("call", title, text)

    with listeners.listening(add_sections):
        yield
