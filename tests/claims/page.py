"""The page docs/claims.md, which the claims' tests write and are compared with.

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

PAGE = Path(__file__).parents[2] / "docs" / "claims.md"

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
    """Fail if the page does not show what this claim measured; with UPDATE_GOLDEN write it."""
    text = section(claim, rows)
    if os.environ.get("UPDATE_GOLDEN"):
        _write(claim, text)
        return
    on_page = sections(PAGE.read_text()).get(_key(claim), "")
    if on_page != text:
        pytest.fail(
            f"docs/claims.md does not say what this claim measured.\n--- the page\n{on_page}\n"
            f"--- measured\n{text}\nIf the new figures are right: "
            "UPDATE_GOLDEN=1 pytest tests/claims -p no:randomly",
            pytrace=False,
        )


def section(claim: Claim, rows: Sequence[Mapping[str, str]]) -> str:
    """The section of the page for a claim."""
    verdict = claim.verdict[0].upper() + claim.verdict[1:]
    return "\n".join(
        [
            f'<a id="{claim.name}"></a>',
            f"### “{claim.statement.rstrip('.')}”",
            "",
            f"**{verdict}.** {claim.answer}",
            "",
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


def whole(by_key: Mapping[str, str]) -> str:
    """The page with these sections, in order."""
    lines = [INTRODUCTION.read_text(), *_contents()]
    for topic in TOPICS:
        title, _, more = (_module(topic).__doc__ or "").strip().partition("\n\n")
        lines += [f"## {title.rstrip('.')}\n", *([more + "\n"] if more else [])]
        lines += [
            f"<!-- {key} -->\n{by_key[key]}\n<!-- end -->\n"
            for key in (_key(claim) for claim in claims() if claim.topic == topic)
            if key in by_key
        ]
    return "\n".join(lines)


def _contents() -> Iterator[str]:
    """The table of all claims with their verdicts, each linked to its section."""
    yield "| what is said | verdict |\n|---|---|"
    for claim in claims():
        statement = claim.statement.rstrip(".").replace("|", "\\|")
        yield f"| [{statement}](#{claim.name}) | {claim.verdict} |"
    yield ""


def _write(claim: Claim, text: str) -> None:
    by_key = sections(PAGE.read_text()) if PAGE.exists() else {}
    PAGE.write_text(whole(by_key | {_key(claim): text}))


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
