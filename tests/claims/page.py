"""docs/claims.md: written by the claims' tests, and held to them.

``UPDATE_GOLDEN=1 pytest tests/claims`` writes it anew; read the difference before you commit it.
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
"""The modules with claims, as the page has them."""

HEAD = """# What people say about averaging, batch size, epochs and learning rate

Every claim on this page is a test, run on ranks; the figures are what it measured, and the page is
written by the tests (`UPDATE_GOLDEN=1 pytest tests/claims`), never by hand. A test whose figures no
longer match its section fails. Each was also seen to fail when the rule that it rests on is turned
into its contrary, by `pytest tests/claims/test_every_claim_can_fail.py`, in every run.
"""


def claims() -> Iterator[Claim]:
    """All claims, in the order of the page."""
    for topic in TOPICS:
        for value in vars(_module(topic)).values():
            found = getattr(value, "claim", None)
            if found is not None:
                yield found


def hold(claim: Claim, rows: Sequence[Mapping[str, str]]) -> None:
    """Fail if the page says other than this claim does, or write it."""
    text = section(claim, rows)
    if os.environ.get("UPDATE_GOLDEN"):
        _write(claim, text)
        return
    on_page = sections(PAGE.read_text()).get(_key(claim), "")
    if on_page != text:
        pytest.fail(
            f"docs/claims.md does not say what this claim measured.\n--- the page\n{on_page}\n"
            f"--- measured\n{text}\nIf that is meant: UPDATE_GOLDEN=1 pytest tests/claims",
            pytrace=False,
        )


def section(claim: Claim, rows: Sequence[Mapping[str, str]]) -> str:
    """The claim as the page prints it."""
    verdict = claim.verdict[0].upper() + claim.verdict[1:]
    return "\n".join(
        [
            f'<a id="{claim.name}"></a>',
            f"### “{claim.said.rstrip('.')}”",
            "",
            f"**{verdict}.** {claim.answer}",
            "",
            *_table(rows),
            "",
            f'Repeat: `pytest "tests/claims/{claim.topic}.py::{claim.name}"`; '
            f"it fails when {claim.opposite.says}.",
        ]
    )


def sections(text: str) -> dict[str, str]:
    """Key of each claim on the page -> its section."""
    found = re.findall(r"<!-- (\S+) -->\n(.*?)\n<!-- end -->", text, flags=re.DOTALL)
    return dict(found)


def whole(by_key: Mapping[str, str]) -> str:
    """The page of these sections, in order."""
    lines = [HEAD, *_contents()]
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
    """Every claim with its verdict, linked to its section."""
    yield "| what is said | verdict |\n|---|---|"
    for claim in claims():
        said = claim.said.rstrip(".").replace("|", "\\|")
        yield f"| [{said}](#{claim.name}) | {claim.verdict} |"
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
