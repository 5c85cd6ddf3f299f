"""Trains with a reference of the user's own, in one process, and records what it does."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from torch import Tensor, nn

from ddp_equivalence.case.case import Case, name_of
from ddp_equivalence.case.errors import BadCase, it_raised
from ddp_equivalence.case.one_process import without_process_group
from ddp_equivalence.case.optimizer_steps import AtSteps, StepRecord
from ddp_equivalence.case.random_state import seeded, step_seed
from ddp_equivalence.case.steps import GradientKey
from ddp_equivalence.case.training import REFERENCE, Training, begin_reference


def train_by_own_reference(
    case: Case,
    model: nn.Module,
    batches: Sequence[Any],
    training: Training,
    at_steps: AtSteps | None,
) -> dict[GradientKey, Tensor | None]:
    """Call the user's reference once for each big batch.

    Returns how far the weights have moved at the end; or what ``at_steps`` asks for at each step of
    an optimizer: how far they have moved until then, or the gradients. Raises BadCase if the
    reference raises.
    """
    assert training.reference is not None
    name = name_of(training.reference)
    before = {one: p.detach().clone() for one, p in model.named_parameters()}
    record = StepRecord(lambda: dict(model.named_parameters()), at_steps or AtSteps())
    try:
        step = begin_reference(training.reference, model)
        with record.watched() if at_steps else nullcontext():
            for number, batch in enumerate(batches):
                with seeded(step_seed(case, number)), without_process_group():
                    step(batch)
    except BadCase:
        raise
    except Exception as error:
        right = f"{REFERENCE}; {it_raised(error)}"
        raise BadCase("reference", name, right) from error
    if at_steps is None:
        return {
            (0, one): p.detach() - before[one] if p.requires_grad else None
            for one, p in model.named_parameters()
        }
    if at_steps.gradients:
        return dict(record.gradients)
    return {
        (step, one): weight - before[one]
        for (step, one), weight in record.weights.items()
        if model.get_parameter(one).requires_grad
    }
