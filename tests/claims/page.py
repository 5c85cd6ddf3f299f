"""docs/claims.md, and the figures beside the tests, which the claims' tests write and are held to.

``UPDATE_GOLDEN=1 pytest tests/claims -p no:randomly`` writes both anew. Read the difference before
you commit it.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.claims.claim import Claim

PAGE = Path(__file__).parents[2] / "docs" / "claims.md"
"""What people say, whether it is true, and why: the page to send to a colleague."""

FIGURES = Path(__file__).with_name("figures.md")
"""What the tests measured, and what would make each of them fail."""

MOST_WORDS = 5000
"""On the page."""

TOPICS = (
    "test_sum_and_average",
    "test_nodes",
    "test_same_training",
    "test_halved_learning_rate",
    "test_mean_of_means",
    "test_sum_loss",
    "test_effective_batch",
    "test_steps_per_epoch",
    "test_what_an_epoch_reads",
    "test_uneven_inputs",
    "test_learning_rate_scaling",
    "test_adam",
    "test_updates",
    "test_devices",
    "test_start_and_restart",
)
"""The modules with claims, in the order of the page."""

INTRODUCTIONS = {
    PAGE: Path(__file__).with_name("introduction.md").read_text(),
    FIGURES: "# Figures of the claims\n\nThe tests write this file. The docstring of each explains "
    "the columns.\n",
}
"""The top of either page; that of the first has the summary."""


def claims() -> Iterator[Claim]:
    """All claims, in the order of the page."""
    for topic in TOPICS:
        for value in vars(_module(topic)).values():
            claim = getattr(value, "claim", None)
            if claim is not None:
                yield claim


def check_or_write(claim: Claim, rows: Sequence[Mapping[str, str]]) -> None:
    """Fail if the pages do not show what this claim says and measured; with UPDATE_GOLDEN write
    them.
    """
    for path, text in ((PAGE, section(claim)), (FIGURES, figures_of(claim, rows))):
        if os.environ.get("UPDATE_GOLDEN"):
            _write(path, claim, text)
            continue
        on_page = sections(path.read_text()).get(claim.name, "")
        if on_page != text:
            pytest.fail(
                f"{path.name} does not show this claim.\n--- the page\n{on_page}\n"
                f"--- this claim\n{text}\nIf the new figures are right: "
                "UPDATE_GOLDEN=1 pytest tests/claims -p no:randomly",
                pytrace=False,
            )


def section(claim: Claim) -> str:
    """The section of the page for a claim."""
    verdict = claim.verdict[0].upper() + claim.verdict[1:]
    answer = " ".join(claim.answer.split())
    sources = "; ".join(f"{one.does}: [{one.where}]({one.url})" for one in claim.sources)
    return "\n".join(
        [
            f'<a id="{claim.name}"></a>',
            f"### “{claim.statement.rstrip('.')}”",
            "",
            f"**{verdict}.** {answer} "
            f"([figures](../tests/claims/{FIGURES.name}#{claim.name}); {sources})",
        ]
    )


def figures_of(claim: Claim, rows: Sequence[Mapping[str, str]]) -> str:
    """The section of the other page: the figures of a claim, and what would make its test fail."""
    return "\n".join(
        [
            f'<a id="{claim.name}"></a>',
            f"### {claim.name}",
            "",
            *_table(rows),
            "",
            f"It fails when {claim.fails_when.says}.",
        ]
    )


def sections(text: str) -> dict[str, str]:
    """The sections on a page, by the name of the claim."""
    section_of = re.compile(
        r'^(<a id="(\w+)"></a>\n.*?)\n(?=\n<a id|\n## |\Z)', re.DOTALL | re.MULTILINE
    )
    return {name: found for found, name in section_of.findall(text)}


def whole(path: Path, by_name: Mapping[str, str]) -> str:
    """The page with these sections, in order."""
    lines = [INTRODUCTIONS[path]]
    for topic in TOPICS:
        title = (_module(topic).__doc__ or "").strip().partition("\n\n")[0]
        lines.append(f"## {title.rstrip('.')}\n")
        names = (claim.name for claim in claims() if claim.topic == topic)
        lines += [f"{by_name[name]}\n" for name in names if name in by_name]
    return "\n".join(lines)


def _write(path: Path, claim: Claim, text: str) -> None:
    by_name = sections(path.read_text()) if path.exists() else {}
    path.write_text(whole(path, by_name | {claim.name: text}))


def _table(rows: Sequence[Mapping[str, str]]) -> Iterator[str]:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    yield f"| {' | '.join(columns)} |"
    yield "|" + "---|" * len(columns)
    for row in rows:
        yield f"| {' | '.join(row.get(name, '') for name in columns)} |"


def _module(topic: str) -> Any:
    return importlib.import_module(f"tests.claims.{topic}")
