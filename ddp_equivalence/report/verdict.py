"""The verdict of one check, and the errors that carry one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NoReturn

import torch

from ddp_equivalence.case.case import Case
from ddp_equivalence.case.training import Compare, Training
from ddp_equivalence.comparison.comparison import Comparison
from ddp_equivalence.diagnosis.analysis import Analysis
from ddp_equivalence.diagnosis.diagnose import Finding
from ddp_equivalence.diagnosis.divisors import Divisors
from ddp_equivalence.diagnosis.hypothesis import ranks_by_number
from ddp_equivalence.diagnosis.lines.words import names_text
from ddp_equivalence.diagnosis.localisation import Localisation
from ddp_equivalence.diagnosis.repairs.find_repairs import Repairs
from ddp_equivalence.diagnosis.shares import NoShares, Shares
from ddp_equivalence.diagnosis.state import BufferBeside, buffers_beside
from ddp_equivalence.diagnosis.time_left import CAUSES
from ddp_equivalence.diagnosis.unknown import Unknown, UnknownBecause
from ddp_equivalence.diagnosis.vacuity import NearestFault
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.measurement.calls import CodeLine
from ddp_equivalence.measurement.measure import Rerun, autocast_of
from ddp_equivalence.measurement.observation import Observation
from ddp_equivalence.measurement.work import Evidence
from ddp_equivalence.ranks.failure import RankFailed, RanksTimedOut
from ddp_equivalence.ranks.lanes import Lane
from ddp_equivalence.report.record import READING
from ddp_equivalence.report.text import plain_text

Outcome = Literal["same", "different", "unknown"]


# Fields that the check found out: to read one is to read the verdict. The pytest plugin asks for
# it, because a test that reads nothing of a verdict passes whatever it is.


class _FoundOut:
    """A field whose value ``make`` gives if nothing else is given. It notes that it was read."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, verdict: Verdict | None, owner: type) -> Any:
        if verdict is None:  # the dataclass takes this for the default
            return self
        if (reading := verdict.__dict__.get(READING)) is not None:
            reading.done = True
        return verdict.__dict__[self._name]

    def __set__(self, verdict: Verdict, value: Any) -> None:
        verdict.__dict__[self._name] = self._make() if value is self else value


def found_out(make: Callable[[], Any] = lambda: None) -> Any:
    """A field that is known once the check has run."""
    return _FoundOut(make)


@dataclass(frozen=True)
class Asked:
    """The question that a verdict answers, beside its case.

    ``promise``: that of a strategy of the catalogue. ``compare``, ``training``: what is compared,
    and how the reference trains. ``planted``: the name of the fault that was planted.
    ``defined_at``: where the step is defined; None for a strategy of the catalogue. ``of_script``:
    the subject is a step of an observed script.
    """

    promise: str = ""
    compare: Compare = "gradients"
    training: Training = field(default_factory=Training)
    planted: str = ""
    defined_at: CodeLine | None = None
    of_script: bool = False


@dataclass(frozen=True)
class JudgedAgain:
    """The results of further judgements of the same step.

    ``float32_at``: where the step computes in float32 in a check in float64, if that could be the
    difference. ``other_precision``: the verdict on the step in the model's own precision, or in
    float64 if the verdict is in the model's own. ``masks_unpredictable``: the big batch could not
    be given the masks of the ranks, so that a step that is the same was compared with dropout
    turned off; ``without_dropout``: the verdict without it on a step that differs, if it could run
    again. ``on_used_ranks``: the outcome on ranks that had run earlier checks, if the step was then
    judged on new ranks, because the libraries ``libraries_kept`` may have kept state there.
    """

    float32_at: str = ""
    other_precision: Verdict | None = None
    masks_unpredictable: bool = False
    without_dropout: Verdict | None = None
    on_used_ranks: Outcome | None = None
    libraries_kept: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False, repr=False)
class Verdict:
    """The result of a check: frozen data; what is costly to know is computed when asked for.

    ``print(verdict)`` is the report that a failing test shows. A verdict is neither true nor false:
    ``assert check(case, step)`` raises TypeError.

    ``outcome``: "same", "different", or "unknown" if nothing was shown; then ``reason`` says why in
    words, and ``unknown_because`` as a value. ``cause``: the public name of the accepted
    explanation, or None. ``findings``: all explanations considered, best first. ``comparison``:
    error and limit by parameter and rank. ``evidence``: rank -> what really ran there.
    ``analysis``: computes the rest when it is asked for; None if there was nothing to analyse.
    ``examples``: the size of the big batch in each step. ``repeat``: the command or call that
    repeats the check.

    ``observed``: rank -> what was seen of a second run of a step that differs; ``why_not_watched``:
    why there was none, if something differs. ``repeated``: whether that run left the same bits;
    None if that is not known. ``wrong_step``: the first optimizer step of a trainer that is not
    that of the big batch; ``comparison`` is then that of its gradients, if these are wrong.
    ``read_order``: the examples of the batch in the order in which the steps of a trainer read
    them, step after step, if it is another than the batch has; the big batches were then made in
    this order. Where a step reads too few, it has some that no step reads.

    ``failure``: how the ranks failed, if they did. ``second_look``: what a rerun on fresh ranks
    showed, after the first run hung or was aborted. ``output``: rank -> what it printed.
    ``changed``: rank -> what the step changed in its process, or left running there.
    """

    case: Case
    subject: str
    lane: Lane
    asked: Asked = field(default_factory=Asked)
    repeat: str = ""
    seconds: float = 0.0
    examples: tuple[int, ...] = ()

    outcome: Outcome = found_out(lambda: "unknown")
    reason: str = found_out(str)
    unknown_because: UnknownBecause | None = found_out()
    cause: str | None = found_out()
    findings: tuple[Finding, ...] = found_out(tuple)
    comparison: Comparison | None = found_out()
    evidence: Mapping[int, Evidence] = found_out(dict)
    analysis: Analysis | None = found_out()

    observed: Mapping[int, Observation] = found_out(dict)
    why_not_watched: str = found_out(str)
    repeated: bool | None = found_out()
    wrong_step: WrongStep | None = found_out()
    read_order: tuple[int, ...] = found_out(tuple)
    again: JudgedAgain = found_out(JudgedAgain)

    failure: RankFailed | None = found_out()
    second_look: Rerun | None = found_out()
    output: Mapping[int, str] = found_out(dict)
    changed: Mapping[int, tuple[str, ...]] = found_out(dict)

    def __str__(self) -> str:
        from ddp_equivalence.report.render import report_lines

        return plain_text(report_lines(self), sys.stdout)

    def full_report(self) -> str:
        """Everything that is known: also the causes that were ruled out, and the evidence."""
        from ddp_equivalence.report.render import full_lines

        return plain_text(full_lines(self), sys.stdout)

    def __repr__(self) -> str:
        # Pytest shows the repr of a value that a test returns, and nobody has read it by that.
        outcome, cause = self.__dict__["outcome"], self.__dict__["cause"]
        of = f"case={self.case!r}, subject={self.subject!r}, lane={self.lane!r}"
        return f"Verdict({of}, outcome={outcome!r}, cause={cause!r})"

    def __bool__(self) -> NoReturn:
        raise TypeError(
            'A verdict is neither true nor false. Write verdict.outcome == "same", or call '
            "assert_equivalent(case, step), which raises unless it is."
        )

    def with_again(self, **changes: Any) -> Verdict:
        """The verdict with other values of these fields of JudgedAgain."""
        return replace(self, again=replace(self.again, **changes))

    @property
    def best(self) -> Finding | None:
        """The explanation that is believed; None without one."""
        return self.findings[0] if self.findings and self.findings[0].accepted else None

    @property
    def causes(self) -> tuple[str, ...]:
        """The names of all causes that it takes to explain the difference."""
        return () if self.best is None else self.best.causes

    @property
    def is_in_float64(self) -> bool:
        """True if the limits are those of float64."""
        return self.analysis is not None and self.analysis.lowest_dtype is torch.float64

    @property
    def why_not_float64(self) -> str:
        """The error of the loss in float64, if the big batch could not be computed in it."""
        return "" if self.analysis is None else self.analysis.reference.why_not_float64

    @property
    def autocast(self) -> torch.dtype | None:
        """The dtype of the autocast regions that the step entered; None without any."""
        return autocast_of(self.evidence)

    @property
    def differing_buffers(self) -> tuple[str, ...]:
        """The model's buffers, such as running statistics, that differ between ranks at the end.

        That is no difference of gradients: every rank may keep statistics of its own examples. A
        later step whose forward pass reads them can differ.
        """
        held: dict[str, set[str]] = {}
        for one in self.evidence.values():
            for name, digest in one.buffers.items():
                held.setdefault(name, set()).add(digest)
        return tuple(name for name, digests in held.items() if len(digests) > 1)

    @property
    def buffers_beside_big_batch(self) -> tuple[BufferBeside, ...]:
        """The model's buffers, such as running statistics, that are not what one big batch leaves.

        That alone is no difference either, unless the next gradient depends on them, which does not
        read the statistics of batch norm: the cause is then ``buffers_differ_from_big_batch``.
        """
        expected = {} if self.analysis is None else self.analysis.reference.buffers
        found = buffers_beside(expected, self.evidence)
        return tuple(b for b in found if any(b.name in e.buffers for e in self.evidence.values()))

    @property
    def shares(self) -> Shares | None:
        """How often each example entered the gradient of each rank; None if that is not known."""
        shares = None if self.analysis is None else self.analysis.shares
        return shares if isinstance(shares, Shares) else None

    @property
    def why_no_shares(self) -> NoShares | None:
        """Why ``shares`` is None; None if there are shares, or nothing was analysed."""
        shares = None if self.analysis is None else self.analysis.shares
        return shares if isinstance(shares, NoShares) else None

    @property
    def divisors(self) -> Divisors | None:
        """The divisors of the ranks' losses, of the reduction and of the big batch, if known."""
        return None if self.analysis is None else self.analysis.divisors

    @property
    def localisation(self) -> Localisation:
        """Where the difference lies, beside its cause."""
        return Localisation() if self.analysis is None else self.analysis.localisation

    @property
    def repairs(self) -> Repairs:
        """The edits of the step that were tried, if it differs without a cause that was seen."""
        return Repairs() if self.analysis is None else self.analysis.repairs

    @property
    def view(self) -> View | None:
        """The difference as the hypotheses see it; None if nothing differs or can be fitted."""
        return None if self.analysis is None else self.analysis.view

    @property
    def numbers_are_known(self) -> bool:
        """True if the big batch was given the random numbers that the ranks drew."""
        return self.analysis is not None and self.analysis.drawn is not None

    @property
    def not_tried(self) -> tuple[str, ...]:
        """The parts of the explanation that the deadline of the case left no time for.

        All parts are computed when this is asked for.
        """
        if self.analysis is None:
            return ()
        if self.outcome == "different":
            _ = self.localisation, self.shares, self.divisors
        return self.analysis.time.not_tried

    @property
    def tried_every_cause(self) -> bool:
        """False if there was no time to try all known causes."""
        return self.analysis is None or not self.analysis.time.has_left_out(CAUSES)

    @property
    def nearest(self) -> NearestFault | None:
        """The known fault that would be hardest to see on this case, and how far away it lies.

        None if nothing was compared, or if the model is too large to tell.
        """
        if self.comparison is None or self.analysis is None:
            return None
        return self.analysis.nearest_fault

    @property
    def error(self) -> float | None:
        """||measured - big batch|| / ||big batch|| of the worst parameter, on its worst rank.

        The worst parameter is furthest beyond its limit; if none is beyond, it is nearest to it.
        """
        worst = self.comparison.worst if self.comparison else None
        return worst.error if worst else None

    @property
    def floor(self) -> float | None:
        """How far rounding alone moves the worst parameter on one device, relative to its norm.

        It is measured now if the verdict did not depend on it; None if the model is too large.
        """
        worst = self.comparison.worst if self.comparison else None
        if worst is None or self.analysis is None:
            return None
        autocast = None if self.is_in_float64 else self.autocast
        return worst.limit.floor or self.analysis.floor_of(worst, autocast)

    @property
    def limit(self) -> float | None:
        """The limit of the worst parameter, relative to its norm."""
        worst = self.comparison.worst if self.comparison else None
        return worst.limit.relative if worst else None


OtherSetting = tuple[str, tuple[str, ...]]
"""How a setting of an optimizer differs, as a clause, and of which parameters; () for all."""


@dataclass(frozen=True)
class WrongStep:
    """The first step of an optimizer that is not that of the big batch.

    ``number``: counted from 1; None unless ``differs`` is "gradients" or "weights". ``differs``:
    what is wrong first: how often optimizers step; the gradients with which one steps; the weights
    after its step, although its gradients were right; or the weights at the end, although they were
    right after every step. ``made``: how many steps each rank makes, in the order of the ranks.
    ``expected``: how many the reference makes. ``settings``: those of the optimizer that are not
    those of the reference in this step; None if they are not known. ``is_named``: a cause says it.
    """

    number: int | None
    differs: Literal["count", "gradients", "weights", "afterwards"]
    made: tuple[int, ...]
    expected: int
    settings: tuple[OtherSetting, ...] | None = None
    is_named: bool = False

    @property
    def headline(self) -> str:
        """The fault in a few words."""
        if self.settings:
            return f"in step {self.number} {self.settings[0][0]}"
        if self.differs == "count":
            if len(set(self.made)) > 1:
                return "the ranks make different numbers of optimizer steps"
            return "the optimizer makes another number of steps"
        if self.differs == "afterwards":
            return "the weights are changed after the last step"
        return f"step {self.number} has wrong {self.differs}"

    @property
    def sentence(self) -> str:
        """The fault as a sentence of the report; "" if the first gradients are wrong, as in a step
        that does not train.
        """
        of = f"The gradients of optimizer step {self.number} of {self.expected} are"
        if self.differs == "count":
            made = sorted(set(self.made))
            if len(made) > 1:
                ranks = {one: [r for r, own in enumerate(self.made) if own == one] for one in made}
                each = ", ".join(f"{one} on {ranks_by_number(on)}" for one, on in ranks.items())
                text = f"The optimizer makes different numbers of steps: {each}. "
                return f"{text}The reference makes {self.expected}."
            steps = f"{' or '.join(map(str, made))} {'step' if made == [1] else 'steps'}"
            return (
                f"The optimizer makes {steps}, and the reference makes {self.expected}: the same "
                "number must be made for the same examples."
            )
        if self.differs == "gradients":
            if self.number is None or self.number == 1:
                return ""
            return f"{of} wrong; after step {self.number - 1} all weights were right."
        if self.differs == "weights":
            why = "the optimizer, learning rate, schedule or clipping is not that of the reference"
            if self.settings is not None:
                others = (
                    f"{what} (of {names_text(names)})" if names else what
                    for what, names in self.settings
                )
                why = "; ".join(others) or (
                    "the settings of the optimizer are those of the reference, so its state, or "
                    "clipping, or something else is not"
                )
            (_, of_some), *more = self.settings or [("", ("",))]
            is_told = self.is_named or (not of_some and not more)
            return f"{of} right, and the weights after it are not{'' if is_told else f': {why}'}."
        return (
            "The weights are right after each step of the optimizer, and something changes them "
            "afterwards."
        )


# The errors that carry a verdict that is not "same".


class _NotSame(AssertionError):
    def __init__(self, verdict: Verdict) -> None:
        self.verdict = verdict
        super().__init__(str(verdict))


class NotEquivalent(_NotSame):
    """The subject does not compute the gradients of one big batch; ``.verdict`` says how."""


class NothingCompared(_NotSame):
    """Nothing was compared, so nothing was shown; ``.verdict`` says why."""


# Verdicts that say that nothing was shown, and why.


def unknown(verdict: Verdict, why: Unknown) -> Verdict:
    """The verdict, which now says that nothing was shown."""
    return replace(verdict, outcome="unknown", reason=why.reason, unknown_because=why.because)


def failed(verdict: Verdict, error: RankFailed) -> Verdict:
    """The verdict is unknown: a failure of ranks shows nothing about the gradients."""
    why = Unknown(UnknownBecause.RANK_FAILED, "a rank failed")
    if isinstance(error, RanksTimedOut):
        why = Unknown(UnknownBecause.RANKS_TIMED_OUT, "ranks timed out")
    if error.ends and error.ends[0].kind == "changed":
        left = "the step leaves more behind than gradients"
        why = Unknown(UnknownBecause.PROCESS_CHANGED, left)
    output = {end.rank: end.output for end in error.ends}
    return replace(unknown(verdict, why), failure=error, output=output)
