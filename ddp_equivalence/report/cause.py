"""The sentences on what was found: the cause, how sure it is, and where to look; and all that a
reader must know beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite
from typing import TYPE_CHECKING

from ddp_equivalence.comparison.digits import text_of
from ddp_equivalence.diagnosis.causes.unreduced import OTHER_BUCKETS
from ddp_equivalence.diagnosis.draws import ON_A_GPU
from ddp_equivalence.diagnosis.examples_read import short_numbers
from ddp_equivalence.measurement.calls import Kind
from ddp_equivalence.report.blocks import place_name
from ddp_equivalence.report.text import Line, labelled, paragraph, plural

if TYPE_CHECKING:
    import torch

    from ddp_equivalence.diagnosis.diagnose import Finding
    from ddp_equivalence.report.verdict import Verdict


ORDINALS = ("First", "Second", "Third", "Fourth")
COUNTS = {2: "two", 3: "three", 4: "four"}
"""Two causes that change the gradient, a collective that was not waited for, and masks."""


def cause_lines(verdict: Verdict) -> list[Line]:
    """Lines on what happened, what was seen of it, where to look, and which edits were tried."""
    best = verdict.best
    if best is None:
        return _trial_lines(verdict)
    causes = (best, *best.more)
    sentence = best.sentence
    if best.more:
        numbered = zip(ORDINALS, (one.sentence for one in causes), strict=False)
        all_of_them = " ".join(f"{ordinal}: {sentence}" for ordinal, sentence in numbered)
        sentence = f"There are {COUNTS[len(causes)]} causes. {all_of_them}"
    return [
        *paragraph(sentence, "  "),
        *labelled("Seen:    ", best.because),
        *labelled("Look at: ", "; and ".join(one.look_at for one in causes)),
        *_trial_lines(verdict),
    ]


def _trial_lines(verdict: Verdict) -> list[Line]:
    """Each edit that repairs the step, and how many were tried; nothing if none was."""
    repairs = verdict.repairs
    if repairs.why_not:
        return labelled("Tried: ", f"no edits of the step, because: {repairs.why_not}")
    if not repairs.tried:
        return []
    of = "" if repairs.tried == repairs.of else f" of {repairs.of}"
    edits = plural(repairs.of, "small edit", "small edits")
    count = f"{repairs.tried}{of} {edits} of the lines that the step runs"
    if not repairs.found:
        return labelled("Tried: ", f"{count}; none of them was seen to repair it.")
    repair = plural(repairs.right, "of them repairs it", "of them repair it, such as")
    lines = labelled("Tried: ", f"{count}; {repairs.right} {repair}:")
    for one in repairs.found:
        lines += labelled(f"  {place_name(one.line)}: ", one.text)
    return lines


# The causes that were considered besides the accepted one, and why they are not believed.

MOST_RULED_OUT = 6


def other_causes_lines(verdict: Verdict) -> list[Line]:
    """The other causes: those that fit too, fit only the numbers, are ruled out, or cannot show."""
    accepted = [finding for finding in verdict.findings if finding.accepted]
    others = [finding for finding in verdict.findings if not finding.fits]
    lines = []
    if len(accepted) > 1:
        names = ", ".join(" and ".join(finding.causes) for finding in accepted)
        lines += labelled("Cannot be told apart on this case: ", names)
        for one in accepted:
            lines += paragraph(one.tell_apart and f"{one.cause}: {one.tell_apart}", "    ")
    same_numbers = (
        f"{finding.cause} ({finding.because or 'no observation supports it'})"
        for finding in verdict.findings
        if finding.fits and not finding.accepted
    )
    ruled_out = "Ruled out: " if accepted else "Nearest known causes, none of which fits: "
    hidden = (finding.cause for finding in others if not finding.would_show)
    return [
        *lines,
        *labelled("Fits the numbers, but: ", "; ".join(same_numbers)),
        *labelled(ruled_out, ", ".join(_ruled_out([one for one in others if one.would_show]))),
        *labelled("Could not be seen on this case: ", ", ".join(hidden)),
    ]


def _ruled_out(findings: list[Finding]) -> Iterator[str]:
    """The nearest causes; those that leave equally much unexplained are counted under the first."""
    causes_by_rest: dict[str, list[str]] = {}
    for finding in findings:
        rest = finding.unexplained
        known = rest is not None and isfinite(rest)
        rest_text = f" ({text_of(rest or 0.0, '.2g')} unexplained)" if known else ""
        causes_by_rest.setdefault(rest_text, []).append(finding.cause)
    groups = list(causes_by_rest.items())
    for rest_text, causes in groups[:MOST_RULED_OUT]:
        alike = f" and {len(causes) - 1} like it" if len(causes) > 1 else ""
        yield f"{causes[0]}{alike}{rest_text}"
    if len(groups) > MOST_RULED_OUT:
        yield f"and {sum(len(causes) for _, causes in groups[MOST_RULED_OUT:])} more"


# On the screen: how sure the cause is.

MOST_OTHERS = 2

ALL = 1e-3
"""A cause that leaves less than this unexplained, which rounding may do, explains everything."""


def how_sure(verdict: Verdict) -> str:
    """Whether the cause was seen, and what of the numbers it explains; "" without a cause."""
    best, comparison = verdict.best, verdict.comparison
    if best is None or best.leaves_a_mistake:
        return ""
    others = [finding for finding in verdict.findings[1:] if finding.accepted]
    parts = (best, *best.more)
    was_seen = not best.is_guess and any(one.lines or one.because for one in parts)
    if others:
        names = [" and ".join(finding.causes) for finding in others]
        more = f" (or {len(names) - MOST_OTHERS} more)" if len(names) > MOST_OTHERS else ""
        advised = (one.tell_apart for one in (best, *others) if one.tell_apart)
        advice = next((one for one in advised if one != OTHER_BUCKETS or _has_ddp(verdict)), "")
        end = f"; {advice[:1].lower()}{advice[1:]}" if advice else "."
        either = " or ".join(names[:MOST_OTHERS])
        return f"Fits, but {either}{more} would leave the same numbers{end}"
    if best.besides is not None:
        factor = text_of(best.besides, ".4g")
        return f"Fits all but a factor of {factor}, which every gradient has besides."
    if best.unexplained is None and comparison is not None and comparison.same:
        return "All gradients of this step are right."
    if best.unexplained is None:
        return "Seen to happen; its part in the difference was not computed." if was_seen else ""
    if not best.fits:
        return "Seen happening; the numbers have other reasons too."
    if not was_seen:
        taken = " (one was taken from the result itself)" if best.fitted else ""
        return f"Fits the numbers{taken}; not seen happening."
    if best.unexplained > ALL:
        return f"Fits all but {text_of(100 * best.unexplained, '.2g')} % of the norm."
    view = verdict.view
    whole = view is None or view.parameters.sample.is_whole
    return f"Fits every element{'' if whole else ' that was looked at'}."


def _has_ddp(verdict: Verdict) -> bool:
    calls = (call for seen in verdict.observed.values() for call in seen.calls)
    return any(call.kind is Kind.WRAP for call in calls)


# On the screen: where a difference without a known cause comes from.

MOST_NAMES = 3


def where_it_lies(verdict: Verdict) -> Iterator[str]:
    """Where the difference lies; nothing with a cause."""
    localisation, wrong = verdict.localisation, verdict.wrong_step
    if verdict.causes or (wrong is not None and wrong.differs != "gradients"):
        return  # the note says what is wrong, and nothing else is known
    found = localisation.whereabouts
    if found is not None and verdict.repairs.text:
        yield found.beside_one_rank  # the lines that the other texts say are marked are not
    elif found is not None:
        yield " ".join(filter(None, [found.beside_one_rank, found.marks]))
        yield found.sentence
    told = "This is told by the inputs of the model, and may be intended."
    yield localisation.rows and f"{localisation.rows} {told}"


# What a reader must know beside the cause and the numbers.

MOST_EXAMPLES = 8
"""So many examples of one step are listed."""


def notes(verdict: Verdict) -> Iterator[str]:
    """Each as a sentence or more, of which the first says most."""
    differs = verdict.outcome == "different"
    if verdict.asked.planted:
        yield f"The fault {verdict.asked.planted} was planted on purpose."
    if verdict.outcome != "unknown":
        yield from training_notes(verdict)
        if verdict.repeated is False:
            other = "The same step left other bits when it ran again"
            yield f"{other}: a race, or an unseeded generator."
        yield random_number_text(verdict)
        yield _without_dropout_text(verdict)
    yield " ".join(_precision_sentences(verdict))
    yield fresh_ranks_text(verdict)
    if differs and not verdict.observed and verdict.why_not_watched and not verdict.repairs.found:
        yield f"No lines of code are known, because {verdict.why_not_watched}."
    if verdict.outcome != "unknown" and verdict.not_tried and verdict.analysis is not None:
        yield (
            f"{'Explained only in part' if differs else 'Not computed'}: the deadline of "
            f"{verdict.analysis.time.deadline:g} s left no time for: "
            f"{', '.join(verdict.not_tried)}. The verdict itself does not depend on this. A longer "
            "deadline gives the rest."
        )


def training_notes(verdict: Verdict) -> Iterator[str]:
    """How the reference trains, and which step of a trainer is wrong."""
    wrong = verdict.wrong_step
    if wrong is not None and wrong.sentence:
        yield wrong.sentence
    if verdict.read_order:
        yield "The big batches follow what the steps read: another order than the batch has."
        if wrong is not None and wrong.number is not None:
            first = sum(verdict.examples[: wrong.number - 1])
            of_step = verdict.read_order[first : first + verdict.examples[wrong.number - 1]]
            examples = f"Examples 0 to {len(of_step) - 1} of step {wrong.number}"
            yield f"{examples} are {short_numbers(of_step, MOST_EXAMPLES)} of the batch."
    training, is_update = verdict.asked.training, verdict.asked.compare == "update"
    if training.is_of_the_user:
        if verdict.outcome == "same":
            yield "Compared with your own reference=."
    elif verdict.outcome == "same":
        return
    elif is_update and training.is_plain_sgd:
        calls = (call for seen in verdict.observed.values() for call in seen.calls)
        rates = {call.value for call in calls if call.kind is Kind.OPTIMIZER_STEP}
        own = ", ".join(text_of(one, ".6g") for one in rates if one and one != training.lr)
        seen = f"; that of the step is {own}." if own else ": is that what the step does?"
        yield f"Compared with plain SGD, learning rate {training.lr:g}{seen}"
    elif is_update and wrong is None and not _is_right_alone(verdict):
        yield "Compared with your optimizer= and clip=: are they those of the step?"


def _is_right_alone(verdict: Verdict) -> bool:
    """True if the step is right on one rank, and so are its optimizer and clipping."""
    found = verdict.localisation.whereabouts
    return found is not None and bool(found.is_right_alone)


# What random numbers, precision, masks and used ranks have to do with the verdict.


def random_number_text(verdict: Verdict) -> str:
    """Which rank was seen to draw, where, and what was seen of the numbers; "" without any, or if a
    cause was named without it.
    """
    drew = _first_draw(verdict)
    if verdict.analysis is None or not drew:
        return ""
    drawn = verdict.analysis.drawn
    if drawn is None:
        if verdict.causes:
            return ""
        return f"The big batch could not be given the random numbers of the ranks. {drew}."
    if not drawn.nothing_else_differs:
        return f"With the ranks' random numbers, the big batch still differs. {drew}."
    held = "held then" if verdict.repeated is False else "hold"
    apart = (
        " Some were drawn once for all examples of a rank, and differ between ranks: right for "
        "noise, wrong for what ranks must share, such as a random projection."
    )
    shared = apart if drawn.table.differs_by_part else ""
    return f"With the ranks' random numbers, the big batch is what they {held}. {drew}.{shared}"


def _first_draw(verdict: Verdict) -> str:
    """``Rank 0 drew at model.py:12``: of the first draw with a line that is known."""
    again = " when it ran again" if verdict.repeated is False else ""
    for rank, seen in sorted(verdict.observed.items()):
        for draw in seen.draws or ():
            if draw.line is not None:
                return f"Rank {rank} drew at {place_name(draw.line)}{again}"
    return ""


def _precision_sentences(verdict: Verdict) -> Iterator[str]:
    """The precisions in which the step was judged, if there were two, and why."""
    other = verdict.again.other_precision
    if verdict.why_not_float64:
        yield (
            f"The loss cannot be computed in float64 ({verdict.why_not_float64}), so the big batch "
            f"was computed in {_precision(verdict)} as well."
        )
    elif verdict.is_in_float64:
        yield from _in_float64(verdict, other)
    elif other is not None and (other.again.float32_at or verdict.autocast is not None):
        yield f"Judged in {_precision(verdict)}. {_in_lower_precision(verdict, other)}"


def _in_float64(verdict: Verdict, other: Verdict | None) -> Iterator[str]:
    if verdict.again.float32_at:
        yield (
            "The difference has the size of float32's rounding, and the step computes in float32 "
            f"inside this check in float64: {verdict.again.float32_at}."
        )
        if other is None:
            yield (
                "The model is built in float64: give the step's constants, buffers and reductions "
                "the dtype of the model, or check it in float32 with Case(dtype=torch.float32)."
            )
    elif verdict.autocast is not None and verdict.outcome == "same":
        name = _name(verdict.autocast)
        yield f"The step enters autocast ({name}), which does nothing in float64."
        if other is None:
            yield "The model is built in float64, so the step was checked in no other precision."
    if other is not None:
        autocast = "" if verdict.autocast is None else f" with autocast ({_name(verdict.autocast)})"
        yield f"In {_precision(other)}{autocast} it was checked as well: {_outcome(other)}."


def _in_lower_precision(verdict: Verdict, other: Verdict) -> str:
    """``other``: the verdict in float64."""
    off = text_of(other.error or 0, ".1e")
    if other.again.float32_at or verdict.autocast is None:
        return (
            f"In float64 it is off by {off}, the rounding of float32, because the step computes in "
            f"float32: {other.again.float32_at}."
        )
    # By more than rounding in float32, and the verdict would be the one in float64.
    by = f" by {off}, which is the size of float32's rounding"
    return (
        f"In float64, where autocast ({_name(verdict.autocast)}) does nothing, the outcome is "
        f"{other.outcome}{by if other.outcome == 'different' else ''}."
    )


def _precision(verdict: Verdict) -> str:
    """The least precise dtype of the model."""
    dtype = None if verdict.analysis is None else verdict.analysis.lowest_dtype
    return "the model's own precision" if dtype is None else _name(dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def error_text(verdict: Verdict, floor: float | None = None) -> str:
    """``error 3.1e-07  floor 2.4e-07  limit 2.0e-06``; "" if nothing was compared."""
    numbers = {"error": verdict.error, "floor": floor, "limit": verdict.limit}
    if verdict.error is None:
        return ""
    known = ((name, one) for name, one in numbers.items() if one is not None)
    return "  ".join(f"{name} {text_of(one, '.1e')}" for name, one in known)


def _outcome(verdict: Verdict) -> str:
    """``different, error 3.1e-01  limit 2.0e-06``."""
    return ", ".join(filter(None, [verdict.outcome, error_text(verdict)]))


def _without_dropout_text(verdict: Verdict) -> str:
    """The verdict on the step without dropout; "" unless masks could not be predicted."""
    if not verdict.again.masks_unpredictable:
        return ""
    again = verdict.again.without_dropout
    if verdict.outcome == "same":
        why = "the big batch could not be given the masks of the ranks"
        return f"Without dropout: this is how the step was compared, since {why}."
    if again is None:
        return (
            f"Without dropout: the step was not judged, because it may not run again here; "
            f"{ON_A_GPU}, so the masks alone make a difference, and nothing is known of other "
            "causes."
        )
    text = f"Without dropout: {_outcome(again)}"
    if again.outcome == "different":
        none = "no known cause fits, so the masks are not the only cause"
        return f"{text}: {' and '.join(again.causes) or none}."
    return f"{text}: {again.reason}." if again.outcome == "unknown" else f"{text}."


def fresh_ranks_text(verdict: Verdict) -> str:
    """The verdict on ranks that had run earlier checks, and that on new ones; "" without both."""
    used, again = verdict.again.on_used_ranks, "ranks that had already run earlier checks"
    if used is None:
        return ""
    kept = f"where {', '.join(verdict.again.libraries_kept)} may have kept state."
    if used == verdict.outcome:
        return f"Fresh ranks: {used} on them as well as on {again}, {kept}"
    return f"Fresh ranks: {verdict.outcome} on them, which counts; {used} on {again}, {kept}"
