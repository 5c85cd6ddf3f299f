"""Does the installed torch still have the defects that are known?

A test that fails is news: either a defect is fixed, or one came back. Then its file must say so.
"""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

import pytest
import torch
from packaging.version import Version

from ddp_equivalence import check
from ddp_equivalence.case import settings
from ddp_equivalence.report.verdict import Verdict
from tests.known_defects.defect import KnownDefect

pytestmark = pytest.mark.self_check

NO_DEFECTS = {"defect", "test_known_defects"}

INSTALLED = Version(torch.__version__.partition("+")[0])


def defects() -> list[KnownDefect]:
    """Those of the files beside this one."""
    names = {one.name for one in pkgutil.iter_modules([str(Path(__file__).parent)])}
    modules = [
        importlib.import_module(f"{__package__}.{name}") for name in sorted(names - NO_DEFECTS)
    ]
    return [module.DEFECT for module in modules]


def shows(verdict: Verdict, defect: KnownDefect) -> bool:
    """The verdict is the one that the defect has."""
    is_it = (verdict.outcome, verdict.cause) == (defect.outcome, defect.cause)
    return is_it and defect.words in " ".join(str(verdict).split())


def news(defect: KnownDefect, seen: bool, installed: Version) -> str:
    """What a reader must hear; "" if it is as the file says."""
    is_fixed = bool(defect.fixed_in) and installed >= Version(defect.fixed_in)
    if seen and is_fixed:
        return f"{defect.name} came back in torch {installed}: it was fixed in {defect.fixed_in}"
    if not seen and not is_fixed:
        return f"{defect.name} is fixed in torch {installed}: write that into its file (fixed_in)"
    return ""


@pytest.mark.parametrize("defect", defects(), ids=lambda one: one.name)
def test_it_is_as_its_file_says(defect: KnownDefect) -> None:
    with settings.using(settings.replaced(trial_seconds=0)):
        verdict = check(defect.case, defect.step, deadline=defect.deadline)
    message = news(defect, shows(verdict, defect), INSTALLED)
    assert not message, f"{message}\n{verdict}"


def test_what_is_fixed_or_comes_back_is_news() -> None:
    open_one, fixed = (
        KnownDefect("one", "", lambda *_: None, "different", "", fixed_in=version)
        for version in ("", "2.14.0")
    )
    old, new = Version("2.13.0"), Version("2.14.1")
    assert news(open_one, True, new) == ""
    assert news(open_one, False, new).startswith("one is fixed in torch 2.14.1")
    assert news(fixed, True, old) == ""
    assert news(fixed, False, new) == ""
    assert news(fixed, True, new).startswith("one came back in torch 2.14.1")


def test_the_page_lists_every_defect() -> None:
    text = (Path(__file__).parents[2] / "docs" / "known_defects.md").read_text()
    for defect in defects():
        assert f"`{defect.name}`" in text
        assert all(url in text for url in defect.upstream)
