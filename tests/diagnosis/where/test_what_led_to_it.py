"""The marked line is the one that led to the fault: in a helper, a property, a backward method.

In each step the faulty line ends with the comment ``# fault``.
"""

from __future__ import annotations

import linecache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ddp_equivalence import Case, Rank, check
from ddp_equivalence.case import settings
from ddp_equivalence.diagnosis.where.groups import fault_of_mixed_shards
from ddp_equivalence.report.render import pointed_lines
from tests.diagnosis.names.small_case import case
from tests.package.own_cases import loss

pytestmark = pytest.mark.self_check

Batch = dict[str, Tensor]


def marked(of: Case, step: Any, cause: str, **options: Any) -> list[str]:
    """The source of the marked lines of a step that has this cause, or none if it is "" ."""
    with settings.using(settings.replaced(trial_seconds=0.0)):
        verdict = check(of, step, **options)
        assert (verdict.outcome, verdict.cause or "") == ("different", cause), verdict
        lines = [one.line for one in pointed_lines(verdict) if one.is_fault]
    return [linecache.getline(one.file, one.number).rstrip() for one in lines]


class Sharded(nn.Module):
    """Two layers that are sharded by themselves, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5)])
        self.head = nn.Linear(5, 3)

    def encode(self, rows: Tensor) -> Tensor:
        for layer in self.layers:
            rows = torch.tanh(layer(rows))
        return rows

    def forward(self, rows: Tensor) -> Any:
        return self.head(self.encode(rows))


def shard(module: nn.Module, mesh: Any) -> None:
    fully_shard(module, mesh=mesh)


def head_in_groups(model: Sharded, batch: Batch, rank: Rank) -> None:
    mesh = init_device_mesh(rank.device.type, (2, 2), mesh_dim_names=("replicate", "shard"))
    for layer in model.layers:
        shard(layer, mesh)
    shard(model, mesh["shard"])  # fault
    loss(model, batch).backward()


def sync_off(model: Any, batch: Batch, rank: Rank) -> None:
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    for number, rows in enumerate(batch["rows"].chunk(3)):
        model.set_requires_gradient_sync(number == 1)  # fault
        model.set_reshard_after_backward(number == 1)
        F.mse_loss(model(rows), batch["targets"].chunk(3)[number]).div(3).backward()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def clips_parts_after_no_sync(model: Any, batch: Batch, rank: Rank) -> Any:
    wrapped = FullyShardedDataParallel(model, device_id=rank.device)  # its flat parameters
    optimizer = sgd(wrapped.parameters())
    first, second = ({n: leaf[k::2] for n, leaf in batch.items()} for k in (0, 1))
    with wrapped.no_sync():
        (loss(wrapped, first) / 2).backward()
    (loss(wrapped, second) / 2).backward()
    nn.utils.clip_grad_norm_(wrapped.parameters(), 0.1)  # fault
    optimizer.step()
    with FullyShardedDataParallel.summon_full_params(wrapped, writeback=False):
        return {
            name.replace("_fsdp_wrapped_module.", ""): parameter.detach().clone()
            for name, parameter in wrapped.named_parameters()
        }


def of_large_targets(model: Any, batch: Batch, count: Any = None) -> Any:
    """The mean error where the target is large, which is not equally often so on all ranks."""
    counted = (batch["targets"] > 0.9).double()
    count = counted.sum() if count is None else count
    return ((model(batch["rows"]) - batch["targets"]).square() * counted).sum() / count


def count_of_all_ranks(model: Any, batch: Batch, rank: Rank) -> None:
    fully_shard(model)
    count = (batch["targets"] > 0.9).double().sum()
    dist.all_reduce(count)  # fault
    of_large_targets(model, batch, count).backward()


def count_of_a_node(model: Any, batch: Batch, rank: Rank) -> None:
    mesh = init_device_mesh(rank.device.type, (2, 2), mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=mesh)
    count = (batch["targets"] > 0.9).double().sum()
    dist.all_reduce(count, group=mesh["shard"].get_group())  # fault
    of_large_targets(model, batch, count / 2).backward()


def ignores_the_head(model: Any, batch: Batch, rank: Rank) -> None:
    wrapped = FullyShardedDataParallel(
        model,
        use_orig_params=True,
        device_id=rank.device,
        ignored_states=[*model.head.parameters()],  # fault
    )
    loss(wrapped, batch).backward()


class Everyone(torch.autograd.Function):
    """The rows of all ranks; the gradients of each row are added up."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        ctx.first = dist.get_rank() * len(rows)
        ctx.count = len(rows)
        parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, rows.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        total = gradient.contiguous() / dist.get_world_size()
        dist.all_reduce(total)  # fault
        return total[ctx.first : ctx.first + ctx.count]


def averages_what_is_whole(model: Any, batch: Batch, rank: Rank) -> None:
    """Each rank has the loss of the whole batch, and backward adds its gradient up."""
    own: Any = Everyone
    ddp = DistributedDataParallel(model)
    outputs = ddp(batch["rows"])
    targets = [torch.empty_like(batch["targets"]) for _ in range(rank.world_size)]
    dist.all_gather(targets, batch["targets"])
    F.mse_loss(own.apply(outputs), torch.cat(targets)).backward()


def calls_a_method(model: Any, batch: Batch, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    hidden = ddp.module.encode(batch["rows"])  # fault
    F.mse_loss(ddp.module.head(hidden), batch["targets"]).backward()


def zeros_of_a_checkpoint(model: Any, batch: Batch, rank: Rank) -> Any:
    hidden = checkpoint(model.encode, batch["rows"], use_reentrant=True)
    ddp = DistributedDataParallel(model.head)
    F.mse_loss(ddp(hidden), batch["targets"]).backward()
    found = {name: one.grad for name, one in model.named_parameters()}
    every = dict(model.named_parameters())
    return {name: torch.zeros_like(every[name]) if g is None else g for name, g in found.items()}


def gathers_without_gradients(model: Any, batch: Batch, rank: Rank) -> None:
    fully_shard(model)
    outputs = model(batch["rows"])
    parts = [torch.empty_like(outputs) for _ in range(rank.world_size)]
    dist.all_gather(parts, outputs.detach())
    parts[rank.rank] = outputs
    mean = torch.cat(parts).mean(0)
    (F.mse_loss(outputs, batch["targets"]) + mean.square().sum()).backward()


def with_the_mean(model: nn.Module, batch: Batch) -> Any:
    outputs = model(batch["rows"])
    return F.mse_loss(outputs, batch["targets"]) + outputs.mean(0).square().sum()


def of_large(targets: Any) -> Any:
    return (targets > 0.2).sum()


def count_of_some_ranks(model: Any, batch: Batch, rank: Rank) -> None:
    """Gradients are added up over all ranks, and divided by what a group has counted."""
    group = dist.new_subgroups(2)[0]
    rows, targets = batch["rows"], batch["targets"]
    count = of_large(targets)
    (F.mse_loss(model(rows), targets, reduction="none") * (targets > 0.2)).sum().backward()
    dist.all_reduce(count, group=group)  # fault
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= count


class Halved(Sharded):
    """Two ranks can share its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(5, 6), nn.Linear(6, 5)])

    def encode(self, rows: Tensor) -> Any:
        return self.layers[1](torch.tanh(self.layers[0](rows)))


def gathered(values: Tensor, mesh: Any) -> Tensor:
    parts = [torch.empty_like(values) for _ in range(mesh.size())]
    dist.all_gather(parts, values.contiguous(), group=mesh.get_group())
    return torch.cat(parts)


def gathers_in_the_other_dimension(model: Any, batch: Batch, rank: Rank) -> Any:
    mesh = init_device_mesh(rank.device.type, (2, 2), mesh_dim_names=("data", "model"))
    split = {"layers.0": ColwiseParallel(), "layers.1": RowwiseParallel()}
    parallelize_module(model, mesh["model"], split)
    fully_shard(model, mesh=mesh["data"])
    read = {name: gathered(values, mesh["data"]) for name, values in batch.items()}  # fault
    loss(model, read).backward()


def clips_before_it_unscales(model: Any, batch: Batch, rank: Rank) -> None:
    fully_shard(model)
    (loss(model, batch) * 256).backward()
    norm: Any = nn.utils.get_total_norm([one.grad for one in model.parameters()])
    for parameter in model.parameters():
        parameter.grad.mul_(0.01 / norm.full_tensor().item())
    for parameter in model.parameters():
        parameter.grad.mul_(1 / 256)  # fault


def clipped(model: Any, batch: Batch) -> Any:
    value = loss(model, batch)
    gradients = torch.autograd.grad(value, tuple(model.parameters()), retain_graph=True)
    return value * (0.01 / torch.stack([one.norm() for one in gradients]).norm()).detach()


def of_large_only(model: Any, batch: Batch) -> Any:
    chosen = batch["targets"] > 0.2
    return ((model(batch["rows"]) - batch["targets"]).square() * chosen).sum() / chosen.sum()


@pytest.mark.parametrize(
    ("step", "cause", "of", "options"),
    [
        (head_in_groups, "", case("2x2", model=Sharded), {}),
        (sync_off, "gradient_sync_off", case(model=Sharded), {}),
        (
            clips_parts_after_no_sync,
            "local_norm_clipped",
            case(dtype=torch.float32),
            {"compare": "update", "optimizer": sgd, "clip": 0.1},
        ),
        (count_of_all_ranks, "averaged_twice", case(loss=of_large_targets), {}),
        (
            count_of_a_node,
            "mean_of_node_means",
            case("2x2", loss=of_large_targets, seed=1),
            {},
        ),
        (ignores_the_head, "ignored_parameter", case(model=Sharded), {}),
        (averages_what_is_whole, "averaged_twice", case(), {}),
        (calls_a_method, "raw_module_called", case(model=Sharded), {}),
        (count_of_some_ranks, "", case("2x2", loss=of_large_only, seed=1), {}),
        (gathers_in_the_other_dimension, "", case("2x2", model=Halved), {}),
        (clips_before_it_unscales, "", case(loss=clipped), {}),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_the_line_that_led_to_it_is_marked(
    step: Any, cause: str, of: Case, options: dict[str, Any]
) -> None:
    assert [one for one in marked(of, step, cause, **options) if one.endswith("# fault")]


def test_a_module_that_a_checkpoint_calls_without_gradients_explains_zeros() -> None:
    lines = marked(case(model=Sharded), zeros_of_a_checkpoint, "")
    assert [one.strip() for one in lines] == ["rows = torch.tanh(layer(rows))"]


def test_hooks_that_fsdp_registers_are_not_marked() -> None:
    with settings.using(settings.replaced(trial_seconds=0.0)):
        verdict = check(case(loss=with_the_mean), gathers_without_gradients)
    assert verdict.outcome == "different"
    assert "a hook on" not in str(verdict)


def of_two_columns() -> nn.Module:
    """Its weight has twice as many elements as its bias."""
    return nn.Linear(2, 3)


def loss_of_two_columns(model: Any, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch["rows"][:, :2]), batch["targets"])


def deals_a_weight_and_adds_up_a_bias(model: Any, batch: Batch, rank: Rank) -> None:
    loss_of_two_columns(model, batch).backward()
    whole = model.weight.grad.view(-1)
    part = torch.empty(3, dtype=whole.dtype)
    dist.reduce_scatter_tensor(part, whole)
    dist.all_reduce(model.bias.grad)
    model.bias.grad.div_(2)
    dist.all_gather_into_tensor(whole, part / 2)
    whole[0] += 0.01 * rank.rank  # fault


def test_a_sum_of_another_parameter_with_the_size_of_a_part_is_no_fault() -> None:
    of = case(model=of_two_columns, loss=loss_of_two_columns)
    lines = marked(of, deals_a_weight_and_adds_up_a_bias, "")
    assert [one for one in lines if one.endswith("# fault")] == lines != []


def calls_layers_and_a_scheduler(model: Any, batch: Batch, rank: Rank) -> None:
    def step() -> None:
        wrapper = DistributedDataParallel(model)
        out = wrapper.module.head(wrapper.module.layers[0](batch["rows"]))  # fault
        F.mse_loss(out, batch["targets"]).backward()
        scheduler.step()

    model.layers = model.layers[:1]
    scheduler = torch.optim.lr_scheduler.ConstantLR(sgd(model.parameters()))
    step()


def of_one_layer() -> Sharded:
    model = Sharded()
    model.layers = model.layers[:1]
    model.encode = model.layers[0].forward  # type: ignore[method-assign]
    return model


def test_a_call_that_has_the_name_of_a_function_around_it_is_not_marked() -> None:
    lines = marked(case(model=of_one_layer), calls_layers_and_a_scheduler, "raw_module_called")
    assert not [one for one in lines if "scheduler" in one]
    assert [one for one in lines if one.endswith("# fault")]


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        return rows * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * 2


class Doubled(Sharded):
    """Has a backward method of its own, which talks to nobody."""

    def encode(self, rows: Tensor) -> Tensor:
        found: Tensor = Twice.apply(super().encode(rows))  # type: ignore[no-untyped-call]
        return found


def gathers_without_gradients_and_adds_up_in_hooks(model: Any, batch: Batch, rank: Rank) -> None:
    def of_all(values: Tensor) -> Tensor:
        parts = [torch.empty_like(values) for _ in range(rank.world_size)]
        dist.all_gather(parts, values.detach())  # fault
        parts[rank.rank] = values
        return torch.cat(parts)

    def hook(gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient.mul(0.5)

    for parameter in model.parameters():
        parameter.register_hook(hook)
    out, targets = of_all(model(batch["rows"])), of_all(batch["targets"])
    F.mse_loss(out, targets).backward()


def test_a_hook_is_no_backward_method() -> None:
    step = gathers_without_gradients_and_adds_up_in_hooks
    lines = marked(case(model=Doubled), step, "gather_without_gradient")
    assert [one for one in lines if one.endswith("# fault")] == lines


def twenty_rows(generator: torch.Generator) -> Batch:
    return {
        "rows": torch.randn(20, 5, generator=generator),
        "targets": torch.randn(20, 3, generator=generator),
    }


def adds_up_parts_in_unequal_groups(model: Any, batch: Batch, rank: Rank) -> None:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3, 4])]
    group = groups[rank.rank > 1]
    size = dist.get_world_size(group)
    loss(model, batch).backward()
    whole = model[0].weight.grad.view(-1).repeat(6)
    part = torch.empty(len(whole) // size, dtype=whole.dtype)
    dist.reduce_scatter_tensor(part, whole, group=group)
    dist.all_reduce(part, group=group)


def test_parts_of_unequal_groups_are_asked_about_without_an_error() -> None:
    with settings.using(settings.replaced(trial_seconds=0.0)):
        verdict = check(case("1x5", batch=twenty_rows), adds_up_parts_in_unequal_groups)
    assert verdict.view is not None
    assert fault_of_mixed_shards(verdict.view) is None
