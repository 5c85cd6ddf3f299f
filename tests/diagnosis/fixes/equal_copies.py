"""What several ranks take for equal, and is not: parts of gradients, inputs of a shared layer."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.func import functional_call
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ddp_equivalence import Rank
from tests.diagnosis.fixes.programs import Batch, shows
from tests.diagnosis.names.small_case import case
from tests.package.own_cases import loss

ACROSS = "add up in groups {0, 2} and {1, 3}, whose ranks have the same part."
ADDED_UP = "give to_local grad_placements=[Partial()], which adds up the gradients of these ranks"
SAME_EXAMPLES = "give ranks 0 and 1 the same examples: deal them by the rank in the data-parallel"


def of_rank(rank: Rank, *groups: list[int]) -> Any:
    """The group of this rank among new ones."""
    made = [dist.new_group(ranks) for ranks in groups]
    return next(one for one, ranks in zip(made, groups, strict=True) if rank.rank in ranks)


@shows(
    "",
    ACROSS,
    {"of_rank(rank, [0, 1], [2, 3])": "of_rank(rank, [0, 2], [1, 3])"},
    case("2x2"),
)
def adds_up_parts_of_one_node(model: Any, shard: Batch, rank: Rank) -> None:
    node = dist.new_subgroups(2)[0]
    others = of_rank(rank, [0, 1], [2, 3])
    loss(model, shard).backward()
    for parameter in model.parameters():
        whole = torch.zeros(-(-parameter.numel() // 2) * 2, dtype=parameter.dtype)
        whole[: parameter.numel()] = parameter.grad.flatten()
        part = torch.empty(len(whole) // 2, dtype=parameter.dtype)
        dist.reduce_scatter_tensor(part, whole, group=node)
        dist.all_reduce(part, group=others)
        dist.all_gather_into_tensor(whole, part, group=node)
        parameter.grad = whole[: parameter.numel()].view_as(parameter) / rank.world_size


@shows(
    "",
    ACROSS,
    {"(shards, shards)": "(shards, of_rank(rank, [0, 2], [1, 3]))"},
    case("2x2"),
)
def replicates_between_other_shards(model: Any, shard: Batch, rank: Rank) -> None:
    shards = of_rank(rank, [0, 1], [2, 3])
    model = FullyShardedDataParallel(
        model,
        process_group=(shards, shards),
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        device_id=rank.device,
        use_orig_params=True,
    )
    loss(model, shard).backward()


def replicated(model: nn.Module, rank: Rank) -> dict[str, Any]:
    mesh = init_device_mesh(rank.device.type, (rank.world_size,))
    return {
        name: nn.Parameter(distribute_tensor(one.detach(), mesh, [Replicate()]))
        for name, one in model.named_parameters()
    }


@shows(
    "no_all_reduce",
    f"{ADDED_UP}, and divide by 2.",
    {"one.to_local()": "one.to_local(grad_placements=[Partial()])", "/ 1": "/ rank.world_size"},
)
def takes_own_gradients_for_whole_ones(model: Any, shard: Batch, rank: Rank) -> Any:
    weights = replicated(model, rank)
    local = {name: one.to_local() for name, one in weights.items()}
    outputs = functional_call(model, local, (shard["rows"],))
    (nn.functional.mse_loss(outputs, shard["targets"]) / 1).backward()
    found = {name: one.grad for name, one in weights.items() if isinstance(one.grad, DTensor)}
    return {name: one.full_tensor() for name, one in found.items()}


class Wide(nn.Module):
    """Two layers that ranks can share, between two that they cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(5, 6)
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 6, bias=False)
        self.leave = nn.Linear(6, 3)

    def forward(self, rows: Tensor) -> Tensor:
        hidden = torch.tanh(self.enter(rows))
        output: Tensor = self.leave(hidden + self.down(torch.relu(self.up(hidden))))
        return output


WIDE = case("2x2", model=Wide, shards="own")


def shared(model: Any, rank: Rank) -> Any:
    """The mesh of the ranks; the two of each node share the wide layer."""
    mesh = init_device_mesh(rank.device.type, (2, 2), mesh_dim_names=("data", "share"))
    parallelize_module(model, mesh["share"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return mesh


def average_over(model: nn.Module, group: Any) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        local: Any = parameter.grad
        local = local.to_local() if isinstance(local, DTensor) else local
        dist.all_reduce(local, group=group)
        local /= 2


@shows(
    "",
    f"{SAME_EXAMPLES} group.",
    {
        "rank.world_size, rank=rank.rank": (
            'mesh["data"].size(), rank=mesh["data"].get_local_rank()'
        )
    },
    WIDE,
)
def deals_examples_to_every_rank(model: Any, batch: Batch, rank: Rank) -> None:
    mesh = shared(model, rank)
    examples = TensorDataset(batch["rows"], batch["targets"])
    sampler: Any = DistributedSampler(
        examples, num_replicas=rank.world_size, rank=rank.rank, shuffle=False
    )
    for rows, targets in DataLoader(examples, batch_size=len(sampler), sampler=sampler):
        nn.functional.mse_loss(model(rows), targets).backward()
    average_over(model, mesh["data"].get_group())


@shows(
    "",
    f"{SAME_EXAMPLES} group.",
    {"chunk(rank.world_size)[rank.rank]": "chunk(rank.nodes)[rank.node]"},
    WIDE,
)
def cuts_the_batch_by_the_number_of_the_rank(model: Any, batch: Batch, rank: Rank) -> None:
    mesh = shared(model, rank)
    rows, targets = (
        leaf.chunk(rank.world_size)[rank.rank] for leaf in (batch["rows"], batch["targets"])
    )
    nn.functional.mse_loss(model(rows), targets).backward()
    average_over(model, mesh["data"].get_group())


class SharedByHand(nn.Module):
    """The wide layer of a model, of which this rank computes one half."""

    def __init__(self, model: Any, mesh: Any) -> None:
        super().__init__()
        self.model, self.mesh = model, mesh
        self.mine = slice(4 * mesh.get_local_rank(), 4 * mesh.get_local_rank() + 4)

    def forward(self, rows: Tensor) -> Any:
        hidden = torch.tanh(self.model.enter(rows))
        entered = DTensor.from_local(hidden, self.mesh, [Replicate()]).to_local()
        up, down = self.model.up, self.model.down
        units = torch.relu(entered @ up.weight[self.mine].T + up.bias[self.mine])
        partial = DTensor.from_local(units @ down.weight[:, self.mine].T, self.mesh, [Partial()])
        return self.model.leave(hidden + partial.full_tensor())


@shows(
    "",
    f"{ADDED_UP}.",
    {"[Replicate()]).to_local()": "[Replicate()]).to_local(grad_placements=[Partial()])"},
    WIDE,
    SharedByHand,
)
def lacks_what_the_other_half_sends_back(model: Any, batch: Batch, rank: Rank) -> None:
    mesh = init_device_mesh(rank.device.type, (2, 2), mesh_dim_names=("data", "share"))
    by_hand = SharedByHand(model, mesh["share"])
    rows, targets = (leaf.chunk(2)[rank.node] for leaf in (batch["rows"], batch["targets"]))
    nn.functional.mse_loss(by_hand(rows), targets).backward()
    average_over(model, mesh["data"].get_group())
    for layer in (model.up, model.down):
        for parameter in layer.parameters():
            dist.all_reduce(parameter.grad, group=mesh["share"].get_group())


@shows(
    "no_all_reduce",
    "call full_tensor(), which adds up the parts of the ranks, not to_local().",
    {"one.grad.to_local()": "one.grad.full_tensor()"},
)
def takes_parts_of_gradients_for_whole_ones(model: Any, shard: Batch, rank: Rank) -> Any:
    weights = replicated(model, rank)
    mesh = next(iter(weights.values())).device_mesh
    rows, targets = (DTensor.from_local(leaf, mesh, [Shard(0)]) for leaf in shard.values())
    outputs = functional_call(model, weights, (rows,))
    (outputs - targets).square().mean().backward()
    return {name: one.grad.to_local() for name, one in weights.items()}


@shows(
    "",
    "all_reduce enter.bias in groups {0, 1} and {2, 3}.",
    {"[model.enter.weight]": "[model.enter.weight, model.enter.bias]"},
    WIDE,
)
def adds_up_only_one_of_two_halves(model: Any, batch: Batch, rank: Rank) -> None:
    """The ranks of a node have the same rows, and each computes with half of the hidden units."""
    mesh = init_device_mesh(rank.device.type, (2, 2), mesh_dim_names=("data", "share"))
    rows, targets = (leaf.chunk(2)[rank.node] for leaf in (batch["rows"], batch["targets"]))
    share = mesh["share"].get_group()
    mine = torch.arange(6) // 3 == rank.local_rank
    hidden = torch.tanh(model.enter(rows))
    hidden = torch.where(mine, hidden, hidden.detach())
    output = model.leave(hidden + model.down(torch.relu(model.up(hidden))))
    nn.functional.mse_loss(output, targets).backward()
    for weight in [model.enter.weight]:
        dist.all_reduce(weight.grad, group=share)
    average_over(model, mesh["data"].get_group())


@shows(
    "",
    "all_reduce up.bias in groups {0, 1} and {2, 3}, and divide by 2.",
    {'if name != "up.bias"': "if True"},
    WIDE,
)
def leaves_a_bias_out_of_the_first_mean(model: Any, batch: Batch, rank: Rank) -> None:
    mesh = init_device_mesh(rank.device.type, (2, 2), mesh_dim_names=("nodes", "local"))
    rows, targets = (leaf.chunk(4)[rank.rank] for leaf in (batch["rows"], batch["targets"]))
    nn.functional.mse_loss(model(rows), targets).backward()
    for name, parameter in model.named_parameters():
        if name != "up.bias":
            dist.all_reduce(parameter.grad, group=mesh["local"].get_group())
            parameter.grad /= 2
    average_over(model, mesh["nodes"].get_group())
