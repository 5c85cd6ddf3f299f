"""Every claim fails when the rule that its answer rests on is changed."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.claims import page
from tests.claims.claim import Claim, Table
from tests.claims.sources import SOURCES


@pytest.mark.parametrize("claim", tuple(page.claims()), ids=lambda claim: claim.name)
def test_the_claim_fails_when_its_rule_is_changed(claim: Claim) -> None:
    with pytest.raises(AssertionError) as failed:
        claim.function(Table(), **{**claim.arguments, **claim.fails_when.arguments})
    failing = failed.traceback[-1].frame.code.raw
    assert failing is claim.function.__code__, f"{failing.co_name} fails, not the claim"


@pytest.mark.skipif("UPDATE_GOLDEN" in os.environ, reason="the pages are being written")
@pytest.mark.parametrize("path", [page.PAGE, page.FIGURES], ids=lambda path: path.name)
def test_the_page_has_every_claim_and_no_other(path: Path) -> None:
    text = path.read_text()
    sections = page.sections(text)
    assert list(sections) == [claim.name for claim in page.claims()]
    assert text == page.whole(path, sections)


def test_the_page_can_be_read_at_a_sitting() -> None:
    assert len(page.PAGE.read_text().split()) <= page.MOST_WORDS


def test_every_claim_has_a_source_and_an_answer_of_a_few_sentences() -> None:
    claims = list(page.claims())
    assert set(SOURCES) == {claim.name for claim in claims}
    for claim in claims:
        assert claim.sources
        assert 10 <= len(claim.answer.split()) <= 70, claim.name


def test_every_file_of_claims_is_a_topic_of_the_page() -> None:
    files = {path.stem for path in page.PAGE.parents[1].glob("tests/claims/test_*.py")}
    assert files - {"test_every_claim_can_fail"} == set(page.TOPICS)


def test_the_summary_links_only_to_claims_of_the_page() -> None:
    introduction = Path(page.__file__).with_name("introduction.md")
    links = re.findall(r"\(#(\w+)\)", introduction.read_text())
    assert len(links) >= 10
    assert set(links) <= {claim.name for claim in page.claims()}
