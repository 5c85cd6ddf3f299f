"""The cause and where to look; or, without a known cause, what is known about the difference."""

from __future__ import annotations

import linecache
import os.path
from collections.abc import Iterator
from math import isfinite
from typing import TYPE_CHECKING

from ddp_equivalence.comparison.digits import text_of
from ddp_equivalence.report.line import Line, labelled, paragraph
from ddp_equivalence.report.trials import trial_lines
from ddp_equivalence.report.watched_run import at_the_loss
from ddp_equivalence.report.wrapping import rank_names

if TYPE_CHECKING:
    from ddp_equivalence.comparison.comparison import Comparison
    from ddp_equivalence.diagnosis.finding import Finding
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
