"""A report about a property of the model or the loss points at the module or the line that has it,
and says that it is no fault.
"""

from __future__ import annotations

import pytest

from ddp_equivalence import Case, check
from tests.diagnosis.lines import steps_with_properties as steps
from tests.diagnosis.lines.faulty_line import Step, case, checked, faults, notes

NORMALISED = case(model=steps.Normalised)
DROPPING = case(model=steps.Dropping)
FUNCTIONAL = case(model=steps.Functional)
COMPARED = case(loss=steps.compared)
STATISTICS = Case(model="mlp", loss="batch_statistics", layout="1x4")

PROPERTIES = [
    (
        NORMALISED,
        steps.one_pass,
        "batch_norm_local_statistics",
        "hidden = self.norm(hidden)",
        "BatchNorm1d norm normalises over the examples of one rank: a property of the model, no "
        "fault",
        "none is needed; use SyncBatchNorm (on GPUs), or compare in eval mode.",
    ),
    (
        NORMALISED,
        steps.with_ddp,
        "batch_norm_local_statistics",
        "hidden = self.norm(hidden)",
        "a property of the model, no fault",
        "none is needed; use SyncBatchNorm (on GPUs), or compare in eval mode.",
    ),
    (
        COMPARED,
        steps.compares_examples,
        "contrastive_local_negatives",
        "similar = outputs @ targets.T",
        "compares the examples of one rank: a property of the loss, no fault",
        "none is needed; compare all ranks' outputs, gathered with their gradient.",
    ),
    (
        STATISTICS,
        steps.penalises_the_variance,
        "batch_statistics_local",
        "variance = outputs.var(dim=0, unbiased=False)",
        "statistics of one rank's examples: a property of the loss, no fault",
        "none is needed; take statistics of all ranks' outputs, gathered with their gradient.",
    ),
]


@pytest.mark.parametrize(("given", "step", "cause", "line", "note", "fix"), PROPERTIES)
def test_a_property_is_shown_where_the_forward_pass_or_the_loss_has_it(
    given: Case, step: Step, cause: str, line: str, note: str, fix: str
) -> None:
    verdict = checked(given, step, cause)
    assert (faults(verdict), verdict.findings[0].fix) == ([line], fix)
    assert note in notes(verdict)


def test_the_line_that_gives_all_ranks_one_seed_is_pointed_at() -> None:
    verdict = checked(DROPPING, steps.seeded_alike, "dropout_same_on_all_ranks")
    assert faults(verdict) == ["torch.manual_seed(1234)"]
    assert "hidden = self.drop(hidden)  Dropout drop drops the same positions" in notes(verdict)
    assert verdict.findings[0].fix == (
        "torch.manual_seed(1234 + rank), after the weights are built alike on all ranks."
    )


@pytest.mark.parametrize("step", [steps.gathers_without_gradient, steps.gathers_under_ddp])
def test_the_gather_that_loses_the_gradient_is_pointed_at(step: Step) -> None:
    verdict = checked(COMPARED, step, "gather_without_gradient")
    assert faults(verdict) == ["dist.all_gather(parts, tensor)"]
    assert "12 elements, which require a gradient; what it returns has none" in notes(verdict)
    assert verdict.findings[0].fix == (
        "use torch.distributed.nn.functional.all_gather, which passes the gradient on."
    )


def test_dropout_is_shown_where_the_big_batch_cannot_be_given_its_masks() -> None:
    verdict = check(FUNCTIONAL, steps.one_pass, steps=2)
    assert verdict.causes == ("dropout_differs_from_reference",), verdict
    fix = "none is needed; compare with dropout turned off (model.eval() or p=0)."
    line = "hidden = F.dropout(hidden, 0.4, self.training)"
    assert (faults(verdict), verdict.findings[0].fix) == ([line], fix)
    assert "dropout draws other masks for a shard than for the big batch" in notes(verdict)


def test_dropout_of_a_module_is_compared_with_the_masks_of_the_ranks_or_without_any() -> None:
    assert check(DROPPING, steps.with_ddp).outcome == "same"
    assert check(DROPPING, steps.with_ddp, steps=2).outcome == "same"
