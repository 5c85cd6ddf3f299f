"""Runs edited versions of a step on ranks, and finds those that give the big batch's gradients."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

from ddp_equivalence.comparison.chunks import RawChunk
from ddp_equivalence.comparison.comparison import Comparator, Comparison
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
    with _fresh_ranks(request, expected, until) as ranks:
        try:
            result, seen = ranks.run()
        except RankFailed as error:
            return Tried(why_not=str(error).strip().partition("\n")[0])
        if isinstance(result, TrialFailed):
            return Tried(why_not=result.acted_outside or result.what)
        if result:
            return Tried(why_not=RIGHT_AS_IT_IS)
        edits = propose(seen)
        waiting, left, hung = list(range(len(edits))), AFTER_THE_FIRST, Counter[int]()
        right: list[int] = []
        count = 0
        while waiting and left > 0 and time.monotonic() < until:
            left -= any(map(settles, right))
            edit = edits[number := waiting.pop(0)]
            try:
                result, _ = ranks.run(edit)
            except RankFailed:
                count += time.monotonic() < until  # unless all of them had to end
                hung[edit.line] += 1
                if hung[edit.line] >= MOST_HUNG:  # where two make ranks hang or die, many do
                    waiting.sort(key=lambda one: edits[one].line == edit.line)
                continue
            if result is not True:
                count += not isinstance(result, TrialFailed) or result.was_edited
            elif ranks.are_still_wrong():
                right.append(number)
                count += 1
            show(f"{count} of {len(edits)}")
    return Tried(tuple(right), count, len(edits))


def holding(
    request: Request, expected: Expected, edits: Sequence[EditedCode], until: float
) -> tuple[int, ...]:
    """The indices of those edits that leave right gradients for this request, which is about
    another case than the one that they were found with.

    All count where the step cannot run in this case as it is, and those that there is no time for
    do not. ``until``: by ``time.monotonic()``.
    """
    everything, found = tuple(range(len(edits))), []
    if not edits or time.monotonic() > until:
        return ()
    with _fresh_ranks(request, expected, until) as ranks:
        try:
            result, _ = ranks.run()
        except RankFailed:
            return everything if time.monotonic() < until else ()
        if isinstance(result, TrialFailed):
            return everything
        for number in everything:
            with suppress(RankFailed):  # an edit that ends the ranks does not count
                if time.monotonic() < until and ranks.run(edits[number])[0] is True:
                    found.append(number)
    return tuple(found)


@contextmanager
def _fresh_ranks(request: Request, expected: Expected, until: float) -> Iterator[_FreshRanks]:
    """An edited step may leave anything behind, so these ranks are stopped behind the block."""
    with ExitStack() as block:
        yield _FreshRanks(request, expected, until, block)


class _FreshRanks:
    """Ranks that run edited steps, and new ones behind each failure.

    ``until``: when all trials end, by ``time.monotonic()``. ``block``: has the ranks in it.
    """

    def __init__(
        self, request: Request, expected: Expected, until: float, block: ExitStack
    ) -> None:
        self._request, self._expected, self._until, self._block = request, expected, until, block
        self._deadline = request.deadline
        self._ranks: RankSet | None = None

    def run(self, edited: EditedCode | None = None) -> tuple[bool | TrialFailed, LocalsSeen]:
        """Whether all ranks hold the gradients of the big batch, and what they have run.

        An edited step may take longer than those before it, but not by much. Raises RankFailed.
        """
        request = self._request
        timeout = min(request.collective_deadline, request.deadline / 2)
        ranks = self._ranks or self._block.enter_context(
            warm_ranks().acquire(request.processes, request.lane, timeout, fresh=True)
        )
        self._ranks, began = ranks, time.monotonic()
        seconds = min(self._deadline, self._until - began)
        trial = Trial(work_of(request), edited)
        try:
            result, seen = _run(ranks, request, self._expected, trial, seconds)
        finally:
            if ranks.broken:
                self._stop()
        if not isinstance(result, TrialFailed):
            took = time.monotonic() - began
            self._deadline = min(self._deadline, max(LEAST_DEADLINE, TIMES_THE_STEP * took))
        return result, seen

    def are_still_wrong(self) -> bool:
        """False if these ranks now do right without an edit, too, so that one shows nothing: what
        earlier runs have left in their processes may hide the fault.
        """
        with suppress(RankFailed):
            if self.run()[0] is False:
                return True
        self._stop()
        return False

    def _stop(self) -> None:
        self._block.close()
        self._ranks = None


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
