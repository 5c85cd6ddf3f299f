"""A report about gradients that are not reduced, or too early, points at the line that does it."""

from __future__ import annotations

import pytest

from tests.diagnosis.lines import steps_that_reduce as steps
from tests.diagnosis.lines.faulty_line import Step, case, checked, faults, notes

CASE = case()

REDUCTIONS = [
    (
        steps.reduces_parameters,
        "parameters_reduced_not_gradients",
        "dist.all_reduce(parameter)",
        "reduces 6 parameters (0.weight, 0.bias and 4 more), not their gradients",
        "all_reduce parameter.grad, not parameter, and divide it by 4.",
    ),
    (
        steps.reduces_a_copy_of_the_parameters,
        "parameters_reduced_not_gradients",
        "dist.all_reduce(flat)",
        "reduces 6 parameters (0.weight, 0.bias and 4 more), not their gradients",
        "all_reduce parameter.grad, not parameter, and divide it by 4.",
    ),
    (
        steps.only_matrices,
        "parameter_not_reduced",
        "matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]",
        "reduces 2 gradients, not that of 0.bias, 2.bias, 4.bias",
        "all_reduce 0.bias, 2.bias, 4.bias too: go through all 6 parameters of the model.",
    ),
    (
        steps.flat_without_the_last_layer,
        "parameter_not_reduced",
        "reducer = FlatReducer(list(model.parameters())[:-2], rank.world_size)",
        "reduces 4 gradients, not that of 4.bias, 4.weight",
        "all_reduce 4.bias, 4.weight too: go through all 6 parameters of the model.",
    ),
    (
        steps.ddp_ignores_one,
        "parameter_not_reduced",
        "DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)",
        "ddp = DistributedDataParallel(model)  DDP did not reduce 4.bias",
        "do not let DDP ignore 4.bias.",
    ),
    (
        steps.hook_skips_a_bucket,
        "bucket_not_reduced",
        "work = dist.all_reduce(buffer, async_op=True)",
        "ddp.register_comm_hook(None, skipping_hook)  register_comm_hook(skipping_hook)",
        "let the communication hook reduce every bucket, also that of 0.bias, 0.weight.",
    ),
    (
        steps.frozen_on_rank_1,
        "parameter_frozen_on_one_rank",
        "layer.weight.requires_grad_(False)",
        "requires_grad = False for 2.weight on rank 1",
        "set requires_grad to the same value on all 4 ranks.",
    ),
    (
        steps.frozen_before_ddp,
        "parameter_frozen_on_one_rank",
        "parameter.requires_grad = trains",
        "requires_grad = False for 4.bias on rank 2",
        "set requires_grad to the same value on all 4 ranks.",
    ),
    (
        steps.hooks_reduce_the_first_micro_batch,
        "reduced_before_backward_finished",
        "dist.all_reduce(parameter.grad)",
        "6 calls while backward was running",
        "reduce once after the last backward has returned, and wait for it.",
    ),
]


@pytest.mark.parametrize(("step", "cause", "line", "note", "fix"), REDUCTIONS)
def test_the_line_that_reduces_wrongly_is_pointed_at(
    step: Step, cause: str, line: str, note: str, fix: str
) -> None:
    verdict = checked(CASE, step, cause)
    assert (faults(verdict)[0], verdict.findings[0].fix) == (line, fix)
    assert note in notes(verdict)
