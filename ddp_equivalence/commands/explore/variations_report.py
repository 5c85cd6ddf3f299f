"""The results of a search through variations of a user's own case, as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from ddp_equivalence.commands.explore.variations_search import OUTCOMES, VariationsSearch

EXPLANATIONS = {
    "same": "the gradients of one big batch",
    "different": "not the big batch",
    "failed": "the ranks failed: nothing was compared",
    "unknown": "could not be judged",
    "refused": "cannot be run, and was left out",
}


def report_lines(search: VariationsSearch) -> Iterator[str]:
    """A count of every outcome, and the report on each smallest case that the search has found."""
    for outcome in OUTCOMES:
        results = search.with_outcome(outcome)
        if not results:
            continue
        yield f"{len(results):>5} {outcome:<10} {EXPLANATIONS[outcome]}"
        reasons = Counter(result.reason for result in results if result.reason)
        for reason, count in reasons.most_common():
            yield f"        {count:>5} {reason.splitlines()[0]}"
    if search.stopped:
        yield f"  {search.stopped}: some variations were not tried"
    for variation, result, report in search.smallest:
        yield ""
        case = f"{variation.layout}, shards {variation.shards}"
        yield f"The smallest case that is {result.outcome}: {case}"
        yield ""
        yield report.rstrip()
