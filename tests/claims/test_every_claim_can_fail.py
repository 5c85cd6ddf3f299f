"""A claim that could not fail would settle nothing: each is tried with its contrary."""

from __future__ import annotations

import os

import pytest

from tests.claims import page
from tests.claims.claim import Claim, Evidence


@pytest.mark.parametrize("claim", tuple(page.claims()), ids=lambda claim: claim.name)
def test_the_claim_fails_when_its_contrary_is_so(claim: Claim) -> None:
    with pytest.raises(AssertionError) as failed:
        claim.function(Evidence(), **{**claim.arguments, **claim.opposite.arguments})
    stated = failed.traceback[-1].frame.code.raw
    assert stated is claim.function.__code__, f"{stated.co_name} fails, not the claim"


@pytest.mark.skipif("UPDATE_GOLDEN" in os.environ, reason="the page is being written")
def test_the_page_has_every_claim_and_no_other() -> None:
    text = page.PAGE.read_text()
    found = page.sections(text)
    assert list(found) == [f"{claim.topic}.{claim.name}" for claim in page.claims()]
    assert text == page.whole(found)


def test_every_file_of_claims_is_a_topic_of_the_page() -> None:
    files = {path.stem for path in page.PAGE.parents[1].glob("tests/claims/test_*.py")}
    assert files - {"test_every_claim_can_fail"} == set(page.TOPICS)
