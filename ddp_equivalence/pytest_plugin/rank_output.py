"""Adds what the ranks printed to the test's report; pytest shows it if the test fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from ddp_equivalence.report import listeners

if TYPE_CHECKING:
    from ddp_equivalence.measurement.request import Request
    from ddp_equivalence.report.verdict import Verdict


@contextmanager
def added_to_report(item: pytest.Item) -> Iterator[None]:
    """Add a section for every rank that printed something in a check made inside the block."""

    def add_sections(verdict: Verdict, request: Request) -> None:
        for rank, text in sorted(verdict.output.items()):
            if text.strip():
                node = verdict.case.ranks.rows[rank].node
                item.add_report_section("call", f"output of rank {rank} (node {node})", text)

    with listeners.listening(add_sections):
        yield
