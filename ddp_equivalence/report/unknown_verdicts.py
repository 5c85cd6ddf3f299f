"""Turns a verdict into one that says that nothing was shown, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ddp_equivalence.diagnosis.unknown import Unknown, UnknownBecause
from ddp_equivalence.ranks.failure import RankFailed, RanksTimedOut
from ddp_equivalence.report.verdict import Verdict


def unknown(verdict: Verdict, why: Unknown) -> Verdict:
    """The same verdict, which now says that nothing was shown."""
    return replace(verdict, outcome="unknown", reason=why.reason, unknown_because=why.because)


def failed(verdict: Verdict, error: RankFailed) -> Verdict:
    """The verdict is unknown: a failure of ranks shows nothing about the gradients."""
    why_unknown = Unknown(UnknownBecause.RANK_FAILED, "a rank failed")
    if isinstance(error, RanksTimedOut):
        why_unknown = Unknown(UnknownBecause.RANKS_TIMED_OUT, "ranks timed out")
    if error.ends and error.ends[0].kind == "changed":
        why_unknown = Unknown(
            UnknownBecause.PROCESS_CHANGED, "the step leaves more behind than gradients"
        )
    output: Mapping[int, str] = {end.rank: end.output for end in error.ends}
    return replace(unknown(verdict, why_unknown), failure=error, output=output)
