"""What a mean over a batch may divide by: examples, elements, tokens that are not padding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from ddp_equivalence.case.batch import count_examples
from ddp_equivalence.case.losses.token_mean import PADDING


def all_counts(batch: Any) -> Mapping[str, float]:
    """Every count of this batch, by name: "examples", "elements of targets" ..."""
    found: dict[str, float] = {"examples": count_examples(batch)}
    for path, leaf in pytree.tree_flatten_with_path(batch)[0]:
        if not isinstance(leaf, Tensor):
            continue
        name = pytree.keystr(path).strip("[]'.") or "the batch"
        found[f"elements of {name}"] = leaf.numel()
        if bool(((leaf == 0) | (leaf == 1)).all()):
            what, counted = f"elements of {name} that are set", leaf != 0
        elif not leaf.is_floating_point():
            what, counted = f"elements of {name} that are not {PADDING}", leaf != PADDING
        else:
            continue
        found[what] = int(counted.sum())
        if counted.ndim > 1:
            # A loss on the next token has no use for the first.
            found[f"{what}, but for the first of each row"] = int(counted[:, 1:].sum())
    return found


def counts(batch: Any) -> Mapping[str, float]:
    """Those that are not zero, each number once."""
    unique: dict[float, str] = {}
    for what, count in all_counts(batch).items():
        unique.setdefault(count, what)
    return {what: count for count, what in unique.items() if count}
