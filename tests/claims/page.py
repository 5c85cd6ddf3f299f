"""The pages of the claims in docs/, which the claims' tests write and are compared with.

``UPDATE_GOLDEN=1 pytest tests/claims -p no:randomly`` writes it anew. Read the difference before
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

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "claims.md"
"""What people say, whether it is true, and why: the page to send to a colleague."""

MEASURED = DOCS / "claims_measured.md"
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

INTRODUCTION = Path(__file__).with_name("introduction.md")
"""The top of the page, with the summary."""


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
    for path, text in ((PAGE, section(claim)), (MEASURED, measured_section(claim, rows))):
        if os.environ.get("UPDATE_GOLDEN"):
            _write(path, claim, text)
            continue
        on_page = sections(path.read_text()).get(_key(claim), "")
        if on_page != text:
            pytest.fail(
                f"docs/{path.name} does not show this claim.\n--- the page\n{on_page}\n"
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
            f"**{verdict}.** {answer} ([measured]({MEASURED.name}#{claim.name}); {sources})",
        ]
    )


def measured_section(claim: Claim, rows: Sequence[Mapping[str, str]]) -> str:
    """The section of the other page: more on a claim, the figures, and how to repeat them."""
    return "\n".join(
        [
            f'<a id="{claim.name}"></a>',
            f"### [“{claim.statement.rstrip('.')}”]({PAGE.name}#{claim.name})",
            "",
            *([claim.more, ""] if claim.more else []),
            *_table(rows),
            "",
            f'Repeat: `pytest "tests/claims/{claim.topic}.py::{claim.name}"`; '
            f"it fails when {claim.fails_when.says}.",
        ]
    )


def sections(text: str) -> dict[str, str]:
    """The sections on a page, by the key of the claim."""
    keys_and_sections = re.findall(r"<!-- (\S+) -->\n(.*?)\n<!-- end -->", text, flags=re.DOTALL)
    return dict(keys_and_sections)


def whole(path: Path, by_key: Mapping[str, str]) -> str:
    """The page with these sections, in order."""
    introduction = Path(__file__).with_name(
        "introduction.md" if path == PAGE else "introduction_measured.md"
    )
    lines = [introduction.read_text()]
    for topic in TOPICS:
        title, _, more = (_module(topic).__doc__ or "").strip().partition("\n\n")
        lines += [f"## {title.rstrip('.')}\n", *([more + "\n"] if more and path != PAGE else [])]
        lines += [
            f"<!-- {key} -->\n{by_key[key]}\n<!-- end -->\n"
            for key in (_key(claim) for claim in claims() if claim.topic == topic)
            if key in by_key
        ]
    return "\n".join(lines)


def _write(path: Path, claim: Claim, text: str) -> None:
    by_key = sections(path.read_text()) if path.exists() else {}
    path.write_text(whole(path, by_key | {_key(claim): text}))


def _table(rows: Sequence[Mapping[str, str]]) -> Iterator[str]:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    yield f"| {' | '.join(columns)} |"
    yield "|" + "---|" * len(columns)
    for row in rows:
        yield f"| {' | '.join(row.get(name, '') for name in columns)} |"


def _key(claim: Claim) -> str:
    return f"{claim.topic}.{claim.name}"


def _module(topic: str) -> Any:
    return importlib.import_module(f"tests.claims.{topic}")
