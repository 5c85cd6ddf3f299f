"""Gradients were added over all ranks and divided by the number of ranks on one node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from ddp_equivalence.comparison.digits import text_of
from ddp_equivalence.diagnosis.factors_of_ranks import also_on_one_rank
from ddp_equivalence.diagnosis.hypothesis import (
    Hypothesis,
    Indication,
    Prediction,
    Words,
    WrongFactor,
    common_loss_factor,
    losses_close,
)
from ddp_equivalence.diagnosis.lines.of_reduction import (
    common_factor,
    line_of_reduction,
    line_that_scales,
    line_that_scales_gradients,
    lines_of_divisor,
    lines_of_hook_number,
)
from ddp_equivalence.diagnosis.lines.words import in_order
from ddp_equivalence.diagnosis.setting import PointedLine
from ddp_equivalence.diagnosis.view import View


def predict(view: View) -> Sequence[Prediction]:
    """The sum of the local gradients, divided by the number of ranks on each rank's own node."""
    if view.setting.layout.nodes == 1:
        return ()
    sizes = [row.local_world_size for row in view.setting.layout.rows]
    divisors = torch.tensor(sizes, dtype=view.expected.dtype)[:, None]
    return tuple(
        Prediction(view.on_reporting_ranks(local.sum(0) / divisors))
        for local in view.local_gradients
    )


def factors(view: View) -> Sequence[WrongFactor]:
    """The number of nodes, where all nodes have equally many ranks."""
    layout = view.setting.layout
    sizes = {row.local_world_size for row in layout.rows}
    if len(sizes) > 1 or layout.nodes == 1 or view.parts.add_up_to_the_big_batch:
        return ()
    return (WrongFactor(view.world_size / sizes.pop(), "all ranks over the ranks of a node"),)


def indication(view: View) -> Indication | None:
    """Looks for a line that divides by the ranks of a node; a factor on one rank is not theirs."""
    alone = [also_on_one_rank(view, one.value) for one in factors(view)]
    if any(alone):
        return alone[0]
    if any(_is_that_of_losses(view, one.value) for one in factors(view)):
        return Indication(False, "the losses at which backward began have this factor already")
    local = _local_world_size(view)
    # With one rank on a node there is nothing to divide, and with one node it is right.
    if factors(view) and local > 1 and line_that_scales_gradients(view, 1 / local) is not None:
        return Indication(True, f"the gradients were divided by {local}, the ranks of one node")
    return None


def _is_that_of_losses(view: View, factor: float) -> bool:
    """True if each rank's losses together are this multiple of the loss of its rows."""
    common = common_loss_factor(view)
    held = common_factor(view)
    if common is None or held is None or not losses_close(held, factor):
        return False
    times = max(len(view.observed.backwards(rank)) for rank in view.observed.by_rank)
    return losses_close(common * times, factor)


def words(view: View) -> Words | None:
    """Less than the sentence says, where no division was seen."""
    local = _local_world_size(view)
    if not factors(view) or line_that_scales(view, 1 / local) is not None:
        return None
    if lines_of_hook_number(view, local, "the ranks of one node"):
        return None
    factor = text_of(factors(view)[0].value, ".4g")
    sentence = (
        f"Gradients are {factor} times what they should be. A division by {local}, the ranks of "
        f"one node, in place of {view.world_size} explains this, but none was seen."
    )
    return Words(sentence, f"gradients are {factor} times too large", is_guess=True)


def lines(view: View) -> Sequence[PointedLine]:
    """Where the gradients are added up, and where they are divided."""
    divided = line_that_scales(view, 1 / _local_world_size(view))
    if divided is None:
        in_hook = lines_of_hook_number(view, _local_world_size(view), "the ranks of one node")
        return in_order(view, line_of_reduction(view, is_fault=not in_hook), *in_hook)
    note = f"{divided.note}, the ranks of one node"
    rank = min(view.observed.by_rank, default=0)
    return in_order(
        view,
        line_of_reduction(view),
        replace(divided, note=note),
        *lines_of_divisor(view, rank, divided.line),
    )


def _local_world_size(view: View) -> int:
    """The number of ranks on the node of the lowest rank that was observed."""
    rank = min(view.observed.by_rank, default=0)
    return view.setting.layout.rows[rank].local_world_size


def fix(view: View) -> str:
    """Divide by the number of all ranks."""
    local, count = _local_world_size(view), view.world_size
    return f"divide by {count}, dist.get_world_size(), not by {local}, the ranks of one node."


HYPOTHESIS = Hypothesis(
    name="divided_by_local_world_size",
    sentence="Gradients were added over all ranks and divided by the number of ranks on one node.",
    look_at="a divisor taken from LOCAL_WORLD_SIZE or torch.cuda.device_count(): "
    "use dist.get_world_size() instead",
    predict=predict,
    factors=factors,
    tell_apart="Use nodes with several ranks, such as 2x4, where the numbers of nodes, of ranks on "
    "a node and of all ranks differ.",
    headline="gradients are divided by local world size",
    lines=lines,
    fix=fix,
    indication=indication,
    words=words,
)
