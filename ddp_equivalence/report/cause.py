"""The cause and where to look; or, without a known cause, what is known about the difference."""

from __future__ import annotations

import linecache
import os
import os.path
from collections.abc import Iterator
from math import isfinite
from typing import TYPE_CHECKING

from ddp_equivalence.comparison.digits import text_of
from ddp_equivalence.diagnosis.draws import ON_A_GPU
from ddp_equivalence.report.evidence import at_the_loss, trial_lines
from ddp_equivalence.report.text import Line, labelled, paragraph, rank_names

if TYPE_CHECKING:
    import torch

    from ddp_equivalence.comparison.comparison import Comparison
    from ddp_equivalence.diagnosis.diagnose import Finding
    from ddp_equivalence.diagnosis.localisation import Localisation
    from ddp_equivalence.report.verdict import Verdict


HALVES = {
    "reduction": "how the ranks' gradients are reduced. Their local gradients are right: the mean "
    "or the sum of these is the big batch",
    "local gradients": "what each rank computes: its data, forward pass and loss. The ranks' local "
    "gradients are reduced correctly, but their mean or sum is not the big batch",
}
"""Where to look for a difference without a known cause, by ``Localisation.wrong_half``."""

STATISTICS = (
    "; a mean, variance or comparison over the batch (a normalisation, in-batch negatives) may see "
    "only the rank's own rows"
)

MIXTURE = 1e-6
"""An unexplained part below this is rounding: the gradient is a mixture of single gradients."""

ORDINALS = ("First", "Second", "Third", "Fourth")
COUNTS = {2: "two", 3: "three", 4: "four"}
"""Two causes that change the gradient, a collective that was not waited for, and masks."""

MOST_MODULES = 4
MOST_WEIGHTS = 4


def cause_lines(verdict: Verdict) -> list[Line]:
    """What happened, what was seen of it, where to look, and which edits of the step were tried."""
    return [*_cause_lines(verdict), *trial_lines(verdict)]


def _cause_lines(verdict: Verdict) -> list[Line]:
    best = verdict.findings[0] if verdict.findings else None
    if best is None or not best.accepted:
        return _without_a_cause(verdict)
    lines = paragraph(_what_happened(best), "  ")
    if best.detail:
        lines += labelled("Namely: ", best.detail)
    if best.besides is not None:
        factor = text_of(best.besides, ".4g")
        lines += labelled("Besides: ", f"every gradient is multiplied by {factor}")
    if best.because:
        lines += labelled("Seen:    ", best.because)
    places = [best.look_at, *(one.look_at for one in best.more)]
    return [*lines, *labelled("Look at: ", "; and ".join(places))]


def _what_happened(finding: Finding) -> str:
    """The sentence of the cause, or those of all causes."""
    if not finding.more:
        return finding.sentence
    sentences = [finding.sentence, *(one.sentence for one in finding.more)]
    numbered = zip(ORDINALS, sentences, strict=False)
    causes = " ".join(f"{ordinal}: {sentence}" for ordinal, sentence in numbered)
    return f"There are {COUNTS[len(sentences)]} causes. {causes}"


def _without_a_cause(verdict: Verdict) -> list[Line]:
    """What is known about a difference that has no name."""
    localisation = verdict.localisation
    lines = _whereabouts(verdict)
    known = "; ".join(_known(verdict))
    lines += labelled("What is known: ", f"{known}.") if known else []
    for module, finding in list((localisation.findings_by_module or {}).items())[:MOST_MODULES]:
        where = f"On the parameters of {module or 'the model itself'} alone"
        fits = "the cause is" if finding.because else "the numbers, and nothing that was seen, fit"
        lines += paragraph(f"{where} {fits} {finding.cause}: {finding.sentence}", "  ")
        lines += labelled("Look at: ", finding.look_at)
    if localisation.wrong_half:
        no_sum = localisation.wrong_half == "local gradients" and _is_coupled(verdict)
        lines += labelled(
            "Look at: ", HALVES[localisation.wrong_half] + (STATISTICS if no_sum else "")
        )
    return lines


def _whereabouts(verdict: Verdict) -> list[Line]:
    """Where the difference is, and the lines that show it."""
    found = verdict.localisation.whereabouts
    if found is None:
        return []
    sentences = (found.beside_one_rank, found.marks, found.sentence)
    lines = paragraph(" ".join(filter(None, sentences)), "  ")
    for one in found.lines:
        mark = "> " if one.is_fault else ""
        place = f"{mark}{os.path.basename(one.line.file)}:{one.line.number}"
        code = linecache.getline(one.line.file, one.line.number).strip()
        lines += labelled(f"{place}: ", code or one.line.function)
        lines += paragraph(one.note, "    ") if one.note else []
        lines += paragraph(f"Missing after it: {one.missing}", "    ") if one.missing else []
    return [*lines, *(labelled("Fix: ", found.fix) if found.fix else [])]


def _is_coupled(verdict: Verdict) -> bool:
    """True if the loss or the model compares examples with each other."""
    return verdict.why_no_shares is not None and verdict.why_no_shares.loss_is_no_sum


def _known(verdict: Verdict) -> Iterator[str]:
    """Facts about a difference without a known cause, as clauses of one sentence."""
    comparison, localisation = verdict.comparison, verdict.localisation
    assert comparison is not None
    yield from _not_finite(verdict, comparison)
    yield from _mixture(verdict)
    if not comparison.ranks_agree:
        yield "the ranks hold different values"
    if verdict.repeated is False:
        yield "a second run left other bits, so there is a race, or randomness without a seed"
    yield from _multiple_of_the_weights(localisation)
    loss = localisation.big_batch_loss
    if loss is not None and (there := at_the_loss(verdict, loss)):
        yield f"the big batch's loss is {text_of(loss, '.4g')}, and backward began {there}"


def _not_finite(verdict: Verdict, comparison: Comparison) -> Iterator[str]:
    distances = [rank.distance for parameter in comparison.parameters for rank in parameter.by_rank]
    if all(map(isfinite, distances)):
        return
    ranks = [
        rank
        for rank, seen in verdict.observed.items()
        if any(one.loss is not None and not isfinite(one.loss) for one in seen.backwards)
    ]
    loss = f", and the loss is not finite on {rank_names(ranks)}" if ranks else ""
    yield f"a rank holds values that are not finite, or too large to square{loss}"


def _mixture(verdict: Verdict) -> Iterator[str]:
    shares = verdict.shares
    if shares is None:
        return
    unexplained = max(shares.unexplained.values())
    if verdict.float32_at:
        return  # rounding in float32 is the reason, and the report says so elsewhere
    if unexplained > MIXTURE:
        yield (
            f"a part of what a rank holds ({text_of(unexplained, '.2g')} of its norm) is not a "
            f"mixture of the {shares.pieces}' gradients and may come from statistics that examples "
            "share, from other weights, from other random numbers, or from damage on the way"
        )
    else:
        yield (
            f"what the ranks hold is a mixture of the {shares.pieces}' gradients, with other "
            "shares than in the big batch (see the shares below)"
        )


def _multiple_of_the_weights(localisation: Localisation) -> Iterator[str]:
    if not localisation.weight_multiples:
        return
    more = ", ..." if len(localisation.weight_multiples) > MOST_WEIGHTS else ""
    names = ", ".join(list(localisation.weight_multiples)[:MOST_WEIGHTS]) + more
    factors = ", ".join(
        dict.fromkeys(text_of(factor, ".2g") for factor in localisation.weight_multiples.values())
    )
    yield (
        f"the error of {names} is {factors} times the weights themselves, so that weight decay or "
        "a penalty is not the same as in the big batch"
    )


# The causes that were considered besides the accepted one, and why they are not believed.

MOST_RULED_OUT = 6


def other_causes_lines(verdict: Verdict) -> list[Line]:
    """The other causes: those that fit too, fit only the numbers, are ruled out, or cannot show."""
    accepted = [finding for finding in verdict.findings if finding.accepted]
    lines = _accepted_together(accepted)
    same_numbers = "; ".join(
        f"{finding.cause} ({finding.because or 'no observation supports it'})"
        for finding in verdict.findings
        if finding.fits and not finding.accepted
    )
    if same_numbers:
        lines += labelled("Fits the numbers, but: ", same_numbers)
    ruled_out = [finding for finding in verdict.findings if not finding.fits and finding.would_show]
    if ruled_out:
        label = "Ruled out: " if accepted else "Nearest known causes, none of which fits: "
        lines += labelled(label, ", ".join(_ruled_out(ruled_out)))
    hidden = ", ".join(
        finding.cause for finding in verdict.findings if not finding.fits and not finding.would_show
    )
    if hidden:
        lines += labelled("Could not be seen on this case: ", hidden)
    return lines


def _accepted_together(accepted: list[Finding]) -> list[Line]:
    """Several causes that explain the difference equally well, and what would tell them apart."""
    if len(accepted) < 2:
        return []
    names = ", ".join(" and ".join(finding.causes) for finding in accepted)
    lines = labelled("Cannot be told apart on this case: ", names)
    for finding in accepted:
        if finding.tell_apart:
            lines += paragraph(f"{finding.cause}: {finding.tell_apart}", "    ")
    return lines


def _ruled_out(findings: list[Finding]) -> Iterator[str]:
    """The nearest causes; those that leave equally much unexplained are counted under the first."""
    causes_by_rest: dict[str, list[str]] = {}
    for finding in findings:
        rest = finding.unexplained
        rest_text = ""
        if rest is not None and isfinite(rest):
            rest_text = f"{text_of(rest, '.2g')} unexplained"
        causes_by_rest.setdefault(rest_text, []).append(finding.cause)
    for number, (rest_text, causes) in enumerate(causes_by_rest.items()):
        if number == MOST_RULED_OUT:
            yield f"and {sum(map(len, list(causes_by_rest.values())[number:]))} more"
            return
        names = causes[0] if len(causes) == 1 else f"{causes[0]} and {len(causes) - 1} like it"
        yield f"{names} ({rest_text})" if rest_text else names


# What the random numbers of a step have to do with its difference.


def random_number_lines(verdict: Verdict) -> list[Line]:
    """For the whole report; nothing if nothing was drawn, or if a cause was named without it."""
    text = random_number_text(verdict)
    return labelled("Random numbers: ", text[:1].lower() + text[1:]) if text else []


def random_number_text(verdict: Verdict) -> str:
    """Which rank was seen to draw, where, and what was seen of the numbers; "" without any."""
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
    return f"With the ranks' random numbers, the big batch is what they {held}. {drew}."


def _first_draw(verdict: Verdict) -> str:
    """``Rank 0 drew at model.py:12``: of the first draw with a line that is known."""
    again = " when it ran again" if verdict.repeated is False else ""
    for rank, seen in sorted(verdict.observed.items()):
        for draw in seen.draws or ():
            if draw.line is not None:
                place = f"{os.path.basename(draw.line.file)}:{draw.line.number}"
                return f"Rank {rank} drew at {place}{again}"
    return ""


# Lines about a step that float64 does not show as it is: with autocast, or float32 inside.


def precision_lines(verdict: Verdict) -> list[Line]:
    """What was judged in which precision, if it was judged in two, and why."""
    text = " ".join(_sentences(verdict))
    return paragraph(text, "  ") if text else []


def _sentences(verdict: Verdict) -> Iterator[str]:
    other = verdict.other_precision
    if verdict.why_not_float64:
        yield (
            f"The loss cannot be computed in float64 ({verdict.why_not_float64}), so the big batch "
            f"was computed in {_precision(verdict)} as well."
        )
    elif verdict.is_in_float64:
        yield from _in_float64(verdict, other)
    elif other is not None:
        yield from _in_lower_precision(verdict, other)


def _in_float64(verdict: Verdict, other: Verdict | None) -> Iterator[str]:
    if verdict.float32_at:
        yield (
            "The difference has the size of float32's rounding, and the step computes in float32 "
            f"inside this check in float64: {verdict.float32_at}."
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


def _in_lower_precision(verdict: Verdict, other: Verdict) -> Iterator[str]:
    """``other``: the verdict in float64."""
    judged = f"Judged in {_precision(verdict)}."
    if other.float32_at:
        yield (
            f"{judged} In float64 it is off by {text_of(other.error or 0, '.1e')}, the rounding of "
            f"float32, because the step computes in float32: {other.float32_at}."
        )
    elif verdict.autocast is not None:
        off = ""
        if other.outcome == "different":  # by more, the verdict would be the one in float64
            off = f" by {text_of(other.error or 0, '.1e')}, which is the size of float32's rounding"
        yield (
            f"{judged} In float64, where autocast ({_name(verdict.autocast)}) does nothing, the "
            f"outcome is {other.outcome}{off}."
        )


def _precision(verdict: Verdict) -> str:
    """The least precise dtype of the model."""
    dtype = None if verdict.analysis is None else verdict.analysis.lowest_dtype
    return "the model's own precision" if dtype is None else _name(dtype)


def _outcome(verdict: Verdict) -> str:
    if verdict.error is None or verdict.limit is None:
        return verdict.outcome
    error, limit = text_of(verdict.error, ".1e"), text_of(verdict.limit, ".1e")
    return f"{verdict.outcome}, error {error}  limit {limit}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# Lines about a step that drops something on a GPU: what it gives with dropout turned off.

LABEL = "Without dropout: "


def without_dropout_lines(verdict: Verdict) -> list[Line]:
    """What the same step gives without dropout; nothing unless masks could not be predicted."""
    if not verdict.masks_unpredictable:
        return []
    again = verdict.without_dropout
    if verdict.outcome == "same":
        why = "the big batch could not be given the masks of the ranks"
        return labelled(LABEL, f"this is how the step was compared, since {why}")
    if again is None:
        return labelled(
            LABEL,
            f"the step was not judged, because it may not run again here; {ON_A_GPU}, so the masks "
            "alone make a difference, and nothing is known of other causes",
        )
    numbers = ""
    if again.error is not None and again.limit is not None:
        numbers = f", error {text_of(again.error, '.1e')}  limit {text_of(again.limit, '.1e')}"
    if again.outcome == "different":
        causes = " and ".join(again.causes) or "no known cause fits, so the masks are not the only"
        return labelled(LABEL, f"different{numbers}: {causes}{'' if again.causes else ' cause'}")
    reason = f": {again.reason}" if again.outcome == "unknown" else ""
    return labelled(LABEL, f"{again.outcome}{numbers}{reason}")


# Lines about a step that was judged on ranks with libraries of earlier checks, and on new ones.

FRESH_RANKS = "Fresh ranks: "


def fresh_ranks_text(verdict: Verdict) -> str:
    """What came out on ranks that had run earlier checks, beside new ones; "" without both."""
    if verdict.on_used_ranks is None:
        return ""
    kept = ", ".join(verdict.libraries_kept)
    if verdict.on_used_ranks == verdict.outcome:
        return (
            f"{verdict.outcome} on them as well as on ranks that had already run earlier checks, "
            f"where {kept} may have kept state."
        )
    return (
        f"{verdict.outcome} on them, which counts; {verdict.on_used_ranks} on ranks that had "
        f"already run earlier checks, where {kept} may have kept state."
    )


def fresh_ranks_lines(verdict: Verdict) -> list[Line]:
    """The same as lines of a report."""
    text = fresh_ranks_text(verdict)
    return labelled(FRESH_RANKS, text) if text else []
