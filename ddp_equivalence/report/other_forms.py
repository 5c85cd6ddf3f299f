"""Gradients that have the values of the big batch in another form, and what follows from that."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ddp_equivalence.comparison.structure import Form
from ddp_equivalence.report.wrapping import plural, rank_names

if TYPE_CHECKING:
    from ddp_equivalence.comparison.comparison import Comparison

MOST_NAMES = 4


def other_form_texts(comparison: Comparison) -> Iterator[str]:
    """One clause for all parameters that have the same two forms, on the same ranks."""
    alike: dict[tuple[Form, Form, tuple[int, ...]], list[str]] = {}
    for one in comparison.other_forms:
        alike.setdefault((one.in_big_batch, one.on_ranks, one.ranks), []).append(one.name)
    for (in_big_batch, on_ranks, ranks), names in alike.items():
        everywhere = len(ranks) == len(comparison.ranks)
        yield _text(names, in_big_batch, on_ranks, "" if everywhere else rank_names(ranks))


def _text(names: list[str], in_big_batch: Form, on_ranks: Form, where: str) -> str:
    """``where``: the ranks, if they are not all of them."""
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    which = ", ".join(names[:MOST_NAMES]) + more
    has, it = plural(len(names), "has", "have"), plural(len(names), "it", "them")
    decay = "an optimizer with weight decay or momentum would"
    if on_ranks is Form.ZEROS:
        return (
            f"{which} {has} no gradient in the big batch and zeros on all ranks: {decay} move {it}"
        )
    if on_ranks is Form.ABSENT:
        return (
            f"{which} {has} {in_big_batch.value} in the big batch and none on any rank: "
            f"{decay} not move {it}"
        )
    return (
        f"{which} {plural(len(names), 'is', 'are')} {in_big_batch.value} in the big batch and "
        f"{on_ranks.value} on {where or 'all ranks'}"
    )
