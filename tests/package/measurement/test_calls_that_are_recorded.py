"""What a rank records of losses, synchronisation, hooks and modules while a step is watched."""

# DDP compares the annotations of a hook with classes. So this file must not import annotations from
# __future__, which turns them into strings.

import linecache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # no stubs
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Rank
from ddp_equivalence.measurement.calls import Call, CodeLine, Kind
from tests.package.pointed_at import Rows, judged, mean_loss, when_done

pytestmark = pytest.mark.self_check


def recorded(step: Any, kind: Kind) -> list[Call]:
    """The calls of this kind on rank 0, in a step that differs."""
    verdict = judged(step)
    assert verdict.outcome == "different", verdict
    return [call for call in verdict.observed[0].calls if call.kind is kind]


def text(line: CodeLine | None) -> str:
    assert line is not None
    return linecache.getline(line.file, line.number).strip()


def in_place(model: Any, rows: Rows, rank: Rank) -> None:
    loss = mean_loss(model, rows)
    loss *= 3
    loss.backward()


def test_each_value_of_a_loss_is_recorded_with_the_line_and_the_operation_that_made_it() -> None:
    losses = recorded(in_place, Kind.LOSS)
    assert [text(one.line) for one in losses] == [
        'return F.mse_loss(model(rows["x"]), rows["y"])',
        "loss = mean_loss(model, rows)",
        "loss *= 3",
    ]
    assert losses[2].what.startswith("MulBackward")
    assert losses[2].value == pytest.approx(3 * (losses[0].value or 0.0))


def switching(model: Any, rows: Rows, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    with ddp.no_sync():
        mean_loss(ddp, rows).backward()
    ddp.require_backward_grad_sync = False


def test_each_change_of_the_synchronisation_is_recorded() -> None:
    flags = recorded(switching, Kind.SYNCHRONISATION)
    assert [(text(one.line), one.value) for one in flags] == [
        ("with ddp.no_sync():", 0.0),
        ("with ddp.no_sync():", 1.0),
        ("ddp.require_backward_grad_sync = False", 0.0),
    ]


def test_no_sync_is_recorded_when_it_is_entered_and_not_when_it_is_left() -> None:
    assert len(recorded(switching, Kind.NO_SYNC)) == 1


def in_half(state: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    work: Any = dist.all_reduce(bucket.buffer().half(), async_op=True)
    return when_done(work, lambda future: future.value()[0].to(bucket.buffer().dtype))


def hooked(model: Any, rows: Rows, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(None, in_half)
    mean_loss(ddp, rows).backward()


def test_a_hook_and_the_type_and_contents_of_its_collective_are_recorded() -> None:
    assert [(text(one.line), one.what) for one in recorded(hooked, Kind.HOOK)] == [
        ("ddp.register_comm_hook(None, in_half)", "in_half")
    ]
    collectives = [one.collective for one in recorded(hooked, Kind.COLLECTIVE)]
    assert [(one.dtype, one.contents.value) for one in collectives if one is not None] == [
        ("float16", "copies of gradients")
    ]


class Trainer:
    """Calls its model by itself, and gives it to functions."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def train(self, rows: Rows) -> None:
        outputs = self.model(rows["x"])
        (through(self.model, rows).mean() + outputs.mean()).backward()


def through(model: Any, rows: Rows) -> Tensor:
    return inner(rows["x"], model)


def inner(inputs: Tensor, module: nn.Module) -> Tensor:
    outputs: Tensor = module(inputs)
    return outputs


def trained(model: Any, rows: Rows, rank: Rank) -> None:
    Trainer(model).train(rows)


def test_the_line_that_named_a_module_is_that_of_the_function_that_was_not_given_it() -> None:
    assert [text(one.chosen_at) for one in recorded(trained, Kind.FORWARD)] == [
        'outputs = self.model(rows["x"])',
        "(through(self.model, rows).mean() + outputs.mean()).backward()",
    ]


def without_weight(model: Any, rows: Rows, rank: Rank) -> None:
    mean_loss(model, rows).backward()
    (mean_loss(model, rows) * 0).backward()


def test_a_backward_that_adds_zeros_changes_nothing() -> None:
    assert recorded(without_weight, Kind.CHANGE) == []


def weighed_by_a_gradient(model: Any, rows: Rows, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    loss = mean_loss(ddp, rows)
    weight = next(model.parameters())
    penalty = torch.autograd.grad(outputs=loss, inputs=weight, retain_graph=True)[0].square().mean()
    torch.autograd.backward(tensors=rank.world_size * loss + 0 * penalty)


def test_a_gradient_that_is_a_part_of_the_loss_is_no_backward_pass() -> None:
    verdict = judged(weighed_by_a_gradient)
    assert verdict.cause == "sum_not_mean"
    assert {len(seen.backwards) for seen in verdict.observed.values()} == {1}


def gradients_by_hand(model: Any, rows: Rows, rank: Rank) -> None:
    parameters = list(model.parameters())
    for one, gradient in zip(
        parameters,
        torch.autograd.grad(mean_loss(model, rows), parameters, retain_graph=True),
        strict=True,
    ):
        dist.all_reduce(gradient)
        one.grad = gradient


def test_the_gradients_of_all_parameters_are_a_backward_pass() -> None:
    verdict = judged(gradients_by_hand)
    assert verdict.cause == "sum_not_mean"
    assert {len(seen.backwards) for seen in verdict.observed.values()} == {1}
