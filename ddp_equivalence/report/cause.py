"""The cause, and where to look; without one, all that was learned."""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING

from ddp_equivalence.report.evidence import at_the_loss
from ddp_equivalence.report.wrapping import of_ranks, wrapped

if TYPE_CHECKING:
    from ddp_equivalence.report.verdict import Verdict

HALVES = {
    "reduction": "how gradients are put together. The ranks' own gradients, before any reduction, "
    "give the big batch",
    "local gradients": "what each rank computes: its data, forward pass and loss. The ranks' own "
    "gradients are put together as they should be, but do not give the big batch",
}
"""Where a difference lies that has no name."""

STATISTICS = (
    "; a mean, variance or comparison over the batch (a normalisation, in-batch negatives) may see "
    "this rank's rows only"
)


def cause_lines(verdict: Verdict) -> list[str]:
    """What happened, what was seen of it, and where to look."""
    best = verdict.findings[0] if verdict.findings else None
    if best is None or not best.accepted:
        return _learned(verdict)
    lines = wrapped(best.sentence, "  ")
    if best.detail:
        lines += wrapped(f"Namely: {best.detail}", "  ")
    if best.because:
        lines += wrapped(f"Seen:    {best.because}", "  ")
    return [*lines, *wrapped(f"Look at: {best.look_at}", "  ")]


def _learned(verdict: Verdict) -> list[str]:
    """What is known of a difference that has no name."""
    comparison = verdict.comparison
    assert comparison is not None
    shares = verdict.shares
    learned = []
    numbers = [rank.ratio for one in comparison.parameters for rank in one.by_rank]
    if not all(map(isfinite, numbers)):
        ranks = [
            rank
            for rank, seen in verdict.observed.items()
            if any(one.loss is not None and not isfinite(one.loss) for one in seen.backwards)
        ]
        began = f": backward began at a loss that is none on {of_ranks(ranks)}" if ranks else ""
        learned.append(f"what the ranks hold is not a finite number{began}")
    if shares is not None and max(shares.unexplained.values()) > 1e-6:
        rest = max(shares.unexplained.values())
        learned.append(
            f"{rest:.2g} of what a rank holds is no mixture of the {shares.pieces}' gradients: "
            "statistics that examples share, other weights, other randomness, or damage on the way"
        )
    elif shares is not None:
        learned.append(
            f"what the ranks hold is a mixture of the {shares.pieces}' gradients with other "
            "weights than the big batch's: read the shares below"
        )
    if not comparison.ranks_agree:
        learned.append("the ranks do not hold the same")
    if verdict.repeated is False:
        learned.append("a second run left other bits: a race, or randomness without a seed")
    localisation = verdict.localisation
    multiples = localisation.weight_multiples
    if multiples:
        names = ", ".join(list(multiples)[:4]) + (", ..." if len(multiples) > 4 else "")
        times = ", ".join(dict.fromkeys(f"{one:.2g}" for one in multiples.values()))
        learned.append(
            f"of {names}, what is off is {times} times the weights themselves: weight decay or a "
            "penalty that counts otherwise than in the big batch"
        )
    loss = localisation.big_batch_loss
    if loss is not None and (there := at_the_loss(verdict, loss)):
        learned.append(f"the big batch's loss is {loss:.4g}, and backward began {there}")
    lines = wrapped(f"Known of it: {'; '.join(learned)}.", "  ") if learned else []
    for module, finding in list((localisation.findings_by_module or {}).items())[:4]:
        what = f"On the parameters of {module or 'the model itself'} alone it is {finding.cause}: "
        lines += wrapped(f"{what}{finding.sentence}", "  ")
        lines += wrapped(f"Look at: {finding.look_at}", "  ")
    half = localisation.wrong_half
    if half is not None:
        is_coupled = half == "local gradients" and "no sum over" in verdict.why_no_shares
        lines += wrapped(f"Look at: {HALVES[half]}{STATISTICS if is_coupled else ''}", "  ")
    return lines
