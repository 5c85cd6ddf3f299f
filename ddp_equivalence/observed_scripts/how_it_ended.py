"""Says how a script ended that did not make all steps that were asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ddp_equivalence.diagnosis.finding import Finding
from ddp_equivalence.diagnosis.unknown import Unknown, UnknownBecause
from ddp_equivalence.observed_scripts.differences_between_ranks import lines_at
from ddp_equivalence.observed_scripts.where_ranks_are import RankPlace
from ddp_equivalence.report.unknown_verdicts import unknown
from ddp_equivalence.report.verdict import Outcome, Verdict
from ddp_equivalence.report.wrapping import plural, rank_names

APART = "ranks_wait_for_each_other"


@dataclass(frozen=True)
class Ending:
    """``code``: with which the command exited; None if it was ended after ``seconds``. ``asked``:
    the steps that it was to make. ``made``: the steps that each rank made. ``ranks``: where each
    was when it was ended. ``printed``: the last lines.
    """

    code: int | None
    seconds: float
    asked: int
    made: Sequence[int]
    printed: str
    ranks: Mapping[int, RankPlace] = field(default_factory=dict)

    @property
    def outcome(self) -> Outcome:
        """What it shows of the script. Ranks that wait in different collectives, or for one that
        has ended, would wait for ever. A rank that does something else may come yet.
        """
        if self.code is None:
            waiting = {
                (str(one.place), one.waits_in) for one in self.ranks.values() if not one.gone
            }
            stuck = all(call for _, call in waiting) and len(self.ranks) == len(self.made)
            apart = len(waiting) > 1 or any(one.gone for one in self.ranks.values())
            return "different" if waiting and stuck and apart else "unknown"
        return "same" if self.code == 0 and len(set(self.made)) <= 1 else "unknown"

    @property
    def text(self) -> str:
        """In words."""
        made = min(self.made, default=0)
        steps = f"{made} of the {self.asked} {plural(self.asked, 'step')} that were asked for"
        if len(set(self.made)) > 1:
            each = (f"rank {rank} made {count}" for rank, count in enumerate(self.made))
            steps += f" ({', '.join(each)})"
        if self.code is None:
            waits = any(one.waits_in for one in self.ranks.values())
            what = "hung" if waits else "was still running"
            longer = "" if waits else ". A longer --deadline lets it go on"
            ended = f"and was ended after {self.seconds:g} s"
            return f"the script {what} after {steps}, {ended}{self._places}{longer}"
        if self.code == 0:
            return f"the script ended by itself after {steps}"
        return f"the script failed after {steps}, with exit code {self.code}"

    @property
    def whole_text(self) -> str:
        """With what a script that failed has printed last."""
        return f"{self.text}; it printed last:\n{self.printed}" if self.code else self.text

    @property
    def without_steps(self) -> str:
        """In words, where no step was made by every rank."""
        if self.code is None:
            within = f"within {self.seconds:g} s{self._places}"
            return f"did not make {self.asked} steps of an optimizer {within}"
        made = "had made the steps that were to be recorded"
        return f"ended with exit code {self.code} before every rank {made}"

    @property
    def _places(self) -> str:
        where = "; ".join(f"rank {rank} {one}" for rank, one in self.ranks.items())
        return f": {where}" if where else ""

    def verdict(self, name: str, last: Verdict) -> Verdict | None:
        """On the script as a whole; None if it has shown no fault. ``last``: on its last step."""
        if self.outcome == "same":
            return None
        subject = f"{name}, after step {min(self.made)} of {self.asked}"
        if self.outcome == "unknown":
            hung = self.code is None
            because = UnknownBecause.RANKS_TIMED_OUT if hung else UnknownBecause.RANK_FAILED
            return replace(
                unknown(last, Unknown(because, self.whole_text)), subject=subject, cause=None
            )
        return replace(
            last, subject=subject, outcome="different", cause=APART, findings=(self._finding(),)
        )

    def _finding(self) -> Finding:
        by_place: dict[RankPlace, list[int]] = {}
        for rank, one in self.ranks.items():
            by_place.setdefault(one, []).append(rank)
        waiting = {one: rank_names(on) for one, on in by_place.items() if not one.gone}
        return Finding(
            cause=APART,
            sentence="ranks wait for each other in different collectives, or for one that has left",
            look_at="what decides how many steps a rank makes: it must be the same on all ranks",
            unexplained=None,
            accepted=True,
            headline=self.text,
            because="; ".join(f"{rank_names(on)} {one}" for one, on in by_place.items()),
            fix="let all ranks make the same steps, such as by a stop that is decided together "
            "from values that are reduced over the ranks.",
            lines=tuple(
                line
                for one, named in waiting.items()
                for line in lines_at(one.place, f"{named}: waits here in {one.waits_in}")
            ),
        )
