"""What a search through variations of somebody's own case has found, as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from ddp_equivalence.commands.explore.step_search import KINDS, Searched

SAYS = {
    "same": "the gradients of one big batch",
    "different": "not the big batch",
    "failed": "the ranks failed: nothing was compared",
    "unknown": "could not be judged",
    "refused": "cannot be run so, and was left out",
}


def lines(searched: Searched) -> Iterator[str]:
    """How many cases came to what, and the smallest of each with its report."""
    for kind in KINDS:
        of_kind = searched.of_kind(kind)
        if not of_kind:
            continue
        yield f"{len(of_kind):>5} {kind:<10} {SAYS[kind]}"
        reasons = Counter(one.why for one in of_kind if one.why)
        for reason, count in reasons.most_common():
            yield f"        {count:>5} {reason.splitlines()[0]}"
    if searched.stopped:
        yield f"  {searched.stopped}: not all was tried"
    for variation, tried, report in searched.smallest:
        ranks = variation.layout
        yield ""
        yield f"The smallest case that is {tried.kind}: {ranks}, shards {variation.shards}"
        yield ""
        yield report.rstrip()
