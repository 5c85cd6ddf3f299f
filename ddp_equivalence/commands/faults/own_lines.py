"""Plant faults in steps of one's own: does the report point at the line at which they act?"""

from __future__ import annotations

import linecache
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

from ddp_equivalence.check_equivalence import check
from ddp_equivalence.commands.faults import own_steps
from ddp_equivalence.commands.user_file import load
from ddp_equivalence.faults import FAULTS
from ddp_equivalence.faults.plant import planted
from ddp_equivalence.report.verdict import Verdict


def lines_right(names: Iterable[str]) -> dict[str, bool]:
    """For each of these faults that can be planted in a step of one's own: is its line right?"""
    found: dict[str, bool] = {}
    with tempfile.TemporaryDirectory(prefix="ddp_equivalence-own-") as folder:
        path = Path(shutil.copy(own_steps.__file__, folder))
        for name in names:
            fault = FAULTS[name]
            if not fault.own_step:
                continue
            user = load(path, fault.own_step)
            with planted(name):
                verdict = check(user.case, user.step, **user.options)
            found[name] = points_at(verdict, name, fault.acts_at)
    return found


def points_at(verdict: Verdict, cause: str, marks: tuple[str, ...]) -> bool:
    """True if the report names this cause, and calls only lines with these marks its fault."""
    for finding in verdict.findings:
        if finding.accepted and cause in finding.causes:
            faulty = [one.line for one in finding.lines if one.is_fault]
            texts = [linecache.getline(line.file, line.number) for line in faulty]
            return bool(texts) and all(text.rpartition("# ")[2].strip() in marks for text in texts)
    return False
