"""An error of the package while it looks for lines does not hide that a step differs."""

from __future__ import annotations

from typing import Any, NoReturn

import pytest

from ddp_equivalence import check
from ddp_equivalence.diagnosis import localisation
from ddp_equivalence.diagnosis.own_errors import own_errors_raised
from ddp_equivalence.diagnosis.where import divergence
from tests.diagnosis.where.faulty import CASE
from tests.diagnosis.where.test_kinds_of_differences import maximum_instead_of_sum


def fail(*_: Any) -> NoReturn:
    raise IndexError("list index out of range")


def test_the_report_says_that_the_search_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(localisation, "find_whereabouts", fail)
    monkeypatch.setattr(divergence, "operations_beside_one_rank", fail)
    with own_errors_raised(False):
        verdict = check(CASE, maximum_instead_of_sum)
        text = " ".join(verdict.full_report().split())
    assert verdict.outcome == "different"
    assert "failed while it looked (IndexError: list index out of range" in text
    assert "test_own_errors.py:" in text


def test_such_an_error_fails_the_tests_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(localisation, "find_whereabouts", fail)
    verdict = check(CASE, maximum_instead_of_sum)
    assert verdict.outcome == "different"
    with pytest.raises(IndexError):
        str(verdict)
