"""Runs edited versions of a step on ranks, and finds those that give the big batch's gradients."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from ddp_equivalence.comparison.comparison import Comparator, Comparison, RawChunk
from ddp_equivalence.comparison.rounding import Expected
from ddp_equivalence.comparison.tolerance import Tolerance
from ddp_equivalence.measurement.edited_code import EditedCode
from ddp_equivalence.measurement.measure import autocast_of, finished, work_of
from ddp_equivalence.measurement.observer import LocalsSeen
from ddp_equivalence.measurement.on_rank import Trial, TrialFailed, run_trial
from ddp_equivalence.measurement.request import Request
from ddp_equivalence.measurement.work import Evidence
from ddp_equivalence.ranks import pickling
from ddp_equivalence.ranks.deadlines import Deadline
from ddp_equivalence.ranks.failure import RankFailed
from ddp_equivalence.ranks.rank_set import RankSet
from ddp_equivalence.ranks.warm_ranks import warm_ranks

LEAST_DEADLINE = 0.5
TIMES_THE_STEP = 5.0
"""An edited step gets ``TIMES_THE_STEP`` times the seconds of the step itself, and at least
``LEAST_DEADLINE`` seconds: many edits leave ranks that wait for each other."""

MOST_HUNG = 2
"""After so many edits of one line that make ranks hang or die, its other edits come last."""

LEFT_AFTER_AN_ERROR = 0.2
"""This part of the time is left to the other ranks once one has raised an exception."""

AFTER_THE_FIRST = 50
"""So many more edits are tried once one is right, to see whether others are."""

RIGHT_AS_IT_IS = "the step left the right gradients when it ran again as it is"


@dataclass(frozen=True)
class Tried:
    """``right``: the indices of the edits with which all ranks hold the big batch's gradients.

    ``count``: how many edits were tried, ``of`` so many; one that could not be made was not, nor
    was one after which the step as it is was right as well.
    ``why_not``: why none was tried.
    """

    right: tuple[int, ...] = ()
    count: int = 0
    of: int = 0
    why_not: str = ""


def try_edits(
    request: Request,
    expected: Expected,
    propose: Callable[[LocalsSeen], Sequence[EditedCode]],
    settles: Callable[[int], bool],
    seconds: float,
    show: Callable[[str], object],
) -> Tried:
    """Run the step with edits of its code in turn, on ranks that do nothing else.

    The step first runs as it is. If it is right then, or would change anything outside its process,
    no edit is tried. ``propose``: gives the edits, once it is known what the step runs.
    ``settles``: True for the index of an edit that shows where the fault is, if it is right.
    ``show``: is told how far this is. Nothing more is tried ``AFTER_THE_FIRST`` edits after such a
    one, or after so many seconds.
    """
    until = time.monotonic() + seconds
    trials = _Trials(request, expected, propose, settles, until)
    timeout = min(request.collective_deadline, request.deadline / 2)
    while trials.remain and time.monotonic() < until:
        try:
            # An edited step may leave anything behind, so these ranks are stopped afterwards.
            with warm_ranks().acquire(
                request.processes, request.lane, timeout, fresh=True
            ) as ranks:
                while trials.remain and time.monotonic() < until and not ranks.broken:
                    trials.run_next(ranks)
                    show(f"{trials.count} of {len(trials.edits or ())}")
        except RankFailed as error:
            if trials.edits is None:
                return Tried(why_not=str(error).strip().partition("\n")[0])
    return Tried(tuple(trials.right), trials.count, len(trials.edits or ()), trials.why_not)


class _Trials:
    """The trials that were made and that remain. The first runs the step as it is.

    ``until``: when all of them end, by ``time.monotonic()``.
    """

    def __init__(
        self,
        request: Request,
        expected: Expected,
        propose: Callable[[LocalsSeen], Sequence[EditedCode]],
        settles: Callable[[int], bool],
        until: float,
    ) -> None:
        self._request, self._expected, self._propose = request, expected, propose
        self._settles, self._until = settles, until
        self._deadline = request.deadline
        self._waiting: list[int] = []
        self._left = AFTER_THE_FIRST
        self._hung = Counter[int]()
        self.edits: Sequence[EditedCode] | None = None
        self.right: list[int] = []
        self.count = 0
        self.why_not = ""

    @property
    def remain(self) -> bool:
        if self.edits is None or self.why_not:
            return not self.why_not
        return bool(self._waiting) and self._left > 0

    def run_next(self, ranks: RankSet) -> None:
        """Raises RankFailed if the ranks failed. The trial then counts as made, unless all of them
        had to end.
        """
        if self.edits is None:
            self._run_as_it_is(ranks)
            return
        number, began = self._waiting.pop(0), time.monotonic()
        self._left -= any(map(self._settles, self.right))
        try:
            result, _ = self._run_once(ranks, self.edits[number])
        except RankFailed:
            self.count += time.monotonic() < self._until
            self._put_off(self.edits, self.edits[number].line)
            raise
        if not isinstance(result, TrialFailed):
            self._allow(time.monotonic() - began)
        if result is True:
            if not self._is_still_wrong(ranks):
                return
            self.right.append(number)
        self.count += not isinstance(result, TrialFailed) or result.was_edited

    def _is_still_wrong(self, ranks: RankSet) -> bool:
        """False if these ranks now do right without an edit, too, so that one shows nothing: what
        earlier runs have left in their processes may hide the fault.
        """
        result, _ = self._run_once(ranks, None)
        ranks.broken = ranks.broken or result is not False
        return result is False

    def _run_as_it_is(self, ranks: RankSet) -> None:
        began = time.monotonic()
        result, seen = self._run_once(ranks, None)
        self._allow(time.monotonic() - began)
        if isinstance(result, TrialFailed):
            self.why_not = result.acted_outside or result.what
        elif result:
            self.why_not = RIGHT_AS_IT_IS
        self.edits = () if self.why_not else self._propose(seen)
        self._waiting = list(range(len(self.edits)))

    def _allow(self, seconds: float) -> None:
        """A step took so many seconds: others may take longer, but not by much."""
        self._deadline = min(self._deadline, max(LEAST_DEADLINE, TIMES_THE_STEP * seconds))

    def _run_once(
        self, ranks: RankSet, edited: EditedCode | None
    ) -> tuple[bool | TrialFailed, LocalsSeen]:
        seconds = min(self._deadline, self._until - time.monotonic())
        trial = Trial(work_of(self._request), edited)
        return _run(ranks, self._request, self._expected, trial, seconds)

    def _put_off(self, edits: Sequence[EditedCode], line: int) -> None:
        """Try other lines first: where two edits make ranks hang or die, many do."""
        self._hung[line] += 1
        if self._hung[line] >= MOST_HUNG:
            self._waiting.sort(key=lambda number: edits[number].line == line)


def holding(
    request: Request,
    expected: Expected,
    edits: Mapping[int, EditedCode],
    among: Sequence[int],
    until: float,
) -> tuple[int, ...]:
    """Which of these edits, by number, leave right gradients for this request, which is about
    another case than the one that they were found with.

    All count where the step cannot run in this case as it is, and those that there is no time for
    do not. ``until``: by ``time.monotonic()``.
    """
    found: list[int] = []
    waiting, deadline = list(among), 0.0
    timeout = min(request.collective_deadline, request.deadline / 2)
    while waiting and time.monotonic() < until:
        acquired = warm_ranks().acquire(request.processes, request.lane, timeout, fresh=True)
        with suppress(RankFailed), acquired as ranks:  # an edit that ends the ranks does not count
            if not deadline:
                began = time.monotonic()
                trial = Trial(work_of(request))
                result, _ = _run(ranks, request, expected, trial, request.deadline)
                if isinstance(result, TrialFailed):
                    return tuple(among)
                deadline = max(LEAST_DEADLINE, TIMES_THE_STEP * (time.monotonic() - began))
            while waiting and time.monotonic() < until and not ranks.broken:
                trial = Trial(work_of(request), edits[number := waiting.pop(0)])
                result, _ = _run(ranks, request, expected, trial, deadline)
                if result is True:
                    found.append(number)
        if not deadline:  # not even the step itself can run
            return tuple(among)
    return tuple(found)


def _run(
    ranks: RankSet, request: Request, expected: Expected, trial: Trial, seconds: float
) -> tuple[bool | TrialFailed, LocalsSeen]:
    """Whether all ranks hold the gradients of the big batch, and what they have run."""
    ranks.submit(pickling.dumps(run_trial, trial))
    reference = expected.reference
    tolerance = Tolerance(reference.lowest_dtype, exact=request.case.exact)
    comparator = Comparator(reference.expected, expected.described, tolerance)
    evidence: dict[int, Evidence] = {}
    failed: TrialFailed | None = None
    seen = LocalsSeen()
    deadline = Deadline.after(seconds)
    for rank, result in ranks.collect_until(deadline):
        if isinstance(result, TrialFailed):
            failed = result
            deadline.until = min(deadline.until, time.monotonic() + LEFT_AFTER_AN_ERROR * seconds)
        elif isinstance(result, LocalsSeen):
            seen.add(result)
        elif isinstance(result, Evidence):
            evidence[rank] = result
            comparator.begin(rank, result.gradients)
        else:
            assert isinstance(result, list)
            for raw in result:
                assert isinstance(raw, RawChunk)
                comparator.add(rank, raw.open())
    if failed is not None:
        return failed, seen
    comparison = finished(comparator, expected, tolerance, autocast_of(evidence))
    return comparison.same and not _raced(comparison, evidence) and not _alike(evidence), seen


def _alike(evidence: Mapping[int, Evidence]) -> bool:
    """True if each rank has called the model with the same rows, which must be the whole batch:
    nothing depends on a reduction then.
    """
    inputs = {one.inputs for one in evidence.values()}
    return len(evidence) > 1 and len(inputs) == 1 and None not in inputs


def _raced(comparison: Comparison, evidence: Mapping[int, Evidence]) -> bool:
    """True if gradients could have been right by chance: they were not waited for."""
    fewest = comparison.fewest_exchanged
    return any(
        one.changed_later or any(missed.elements >= fewest for missed in one.missed_waits)
        for one in evidence.values()
    )
