"""Right ways to average gradients with the collectives of torch.distributed."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed.nn import functional as with_gradient
from torch.nn.utils import parameters_to_vector

from benchmarks.programs.common import (
    average,
    deeper_mlp,
    global_sum,
    gradients,
    mean_squared_error,
)
from benchmarks.programs.program import Programs
from ddp_equivalence import Rank

programs = Programs("reductions", right=True)


def node_groups(rank: Rank, first_ranks: list[int]) -> tuple[Any, Any, int]:
    """The group of this rank's node, the group of the nodes' first ranks, and this node's first."""
    ends = [*first_ranks[1:], rank.world_size]
    own = None
    for start, end in zip(first_ranks, ends, strict=True):
        group = dist.new_group(list(range(start, end)))
        own = group if start <= rank.rank < end else own
    return own, dist.new_group(first_ranks), max(n for n in first_ranks if n <= rank.rank)


def sum_by_nodes(model: nn.Module, rank: Rank, first_ranks: list[int]) -> None:
    """Reduce to the first rank of each node, sum over these, and broadcast inside the nodes."""
    own, leaders, leader = node_groups(rank, first_ranks)
    for gradient in gradients(model):
        dist.reduce(gradient, dst=leader, group=own)
        if rank.rank == leader:
            dist.all_reduce(gradient, group=leaders)
        dist.broadcast(gradient, src=leader, group=own)
        gradient /= rank.world_size


@programs.step(layout="2x2")
def summed_by_nodes(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Sums inside each of two nodes, then between the first ranks of the nodes."""
    mean_squared_error(model, shard).backward()
    sum_by_nodes(model, rank, [0, 2])


@programs.step(layout="1+3")
def summed_by_uneven_nodes(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Sums inside a node of one rank and one of three, then between their first ranks."""
    mean_squared_error(model, shard).backward()
    sum_by_nodes(model, rank, [0, 1])


@programs.step(layout="1+3")
def means_of_uneven_nodes_weighted(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Each node's mean counts by its number of ranks."""
    mean_squared_error(model, shard).backward()
    own, _, leader = node_groups(rank, [0, 1])
    for gradient in gradients(model):
        dist.all_reduce(gradient, op=dist.ReduceOp.AVG, group=own)
        gradient *= rank.local_world_size / rank.world_size if rank.rank == leader else 0
        dist.all_reduce(gradient)


@programs.step(model=deeper_mlp)
def started_together_and_waited_for(model: nn.Module, shard: Any, rank: Rank) -> None:
    """All all-reduces are started, then each is waited for before its gradient is divided."""
    mean_squared_error(model, shard).backward()
    works = [(each, dist.all_reduce(each, async_op=True)) for each in gradients(model)]
    for gradient, work in works:
        work.wait()
        gradient /= rank.world_size


@programs.step(model=deeper_mlp)
def coalesced(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The all-reduces are handed to the backend together."""
    mean_squared_error(model, shard).backward()
    dist.all_reduce_coalesced(gradients(model))
    for gradient in gradients(model):
        gradient /= rank.world_size


@programs.step(model=deeper_mlp)
def flattened_by_torch(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Torch's own functions flatten the gradients and take them apart again."""
    mean_squared_error(model, shard).backward()
    flat = _flatten_dense_tensors(gradients(model))
    dist.all_reduce(flat)
    parts = _unflatten_dense_tensors(flat / rank.world_size, gradients(model))
    for gradient, part in zip(gradients(model), parts, strict=True):
        gradient.copy_(part)


@programs.step(model=deeper_mlp)
def in_buckets_of_twenty(model: nn.Module, shard: Any, rank: Rank) -> None:
    """A vector of all gradients is averaged in pieces that do not end where parameters end."""
    mean_squared_error(model, shard).backward()
    vector = parameters_to_vector(gradients(model))
    for piece in vector.split(20):
        dist.all_reduce(piece, op=dist.ReduceOp.AVG)
    start = 0
    for gradient in gradients(model):
        gradient.copy_(vector[start : start + gradient.numel()].view_as(gradient))
        start += gradient.numel()


@programs.step()
def gathered_and_broadcast(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Rank 0 gathers all gradients, takes the mean and broadcasts it."""
    mean_squared_error(model, shard).backward()
    for gradient in gradients(model):
        everywhere = [torch.empty_like(gradient) for _ in range(rank.world_size)]
        dist.gather(gradient, everywhere if rank.rank == 0 else None, dst=0)
        if rank.rank == 0:
            gradient.copy_(torch.stack(everywhere).mean(0))
        dist.broadcast(gradient, src=0)


@programs.step(layout="2x2")
def butterfly(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Four ranks exchange with a neighbour, and then with the rank two further on."""
    mean_squared_error(model, shard).backward()
    for gradient in gradients(model):
        for distance in (1, 2):
            other, received = rank.rank ^ distance, torch.empty_like(gradient)
            works = [dist.isend(gradient.clone(), other), dist.irecv(received, other)]
            for work in works:
                work.wait()
            gradient += received
        gradient /= rank.world_size


@programs.step()
def batched_sends_to_everyone(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Every rank sends its gradients to all others, and sums in the order of the ranks."""
    mean_squared_error(model, shard).backward()
    vector = parameters_to_vector(gradients(model))
    everywhere = [torch.empty_like(vector) for _ in range(rank.world_size)]
    everywhere[rank.rank] = vector
    others = [other for other in range(rank.world_size) if other != rank.rank]
    sends = [dist.P2POp(dist.isend, vector, other) for other in others]
    receives = [dist.P2POp(dist.irecv, everywhere[other], other) for other in others]
    for work in dist.batch_isend_irecv(sends + receives):
        work.wait()
    torch.nn.utils.vector_to_parameters(torch.stack(everywhere).mean(0), gradients(model))


@programs.step(layout="1x3")
def parts_exchanged_with_all_to_all(model: nn.Module, shard: Any, rank: Rank) -> None:
    """all_to_all_single hands every rank its part of all gradients; then the sums are gathered."""
    mean_squared_error(model, shard).backward()
    vector = parameters_to_vector(gradients(model))
    padded = nn.functional.pad(vector, (0, -len(vector) % rank.world_size))
    parts = torch.empty_like(padded)
    dist.all_to_all_single(parts, padded)
    mine = parts.view(rank.world_size, -1).mean(0)
    dist.all_gather_into_tensor(padded, mine)
    torch.nn.utils.vector_to_parameters(padded[: len(vector)], gradients(model))


@programs.step()
def functional_collectives(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The functional all_reduce returns a new tensor and leaves its argument as it was."""
    mean_squared_error(model, shard).backward()
    everyone = list(range(rank.world_size))
    for parameter in model.parameters():
        total = functional.all_reduce(parameter.grad, "sum", everyone)
        parameter.grad = total / rank.world_size


@programs.step()
def loss_reduced_with_gradient(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The all_reduce of the loss sends the sum of all ranks' gradients back: W, divided by W."""
    value = with_gradient.all_reduce(mean_squared_error(model, shard))
    (value / rank.world_size).backward()
    average(model, rank)


@programs.step()
def divided_by_hooks(model: nn.Module, shard: Any, rank: Rank) -> None:
    """A hook divides every gradient while it arrives, and the step sums."""
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient / rank.world_size)
    mean_squared_error(model, shard).backward()
    for gradient in gradients(model):
        dist.all_reduce(gradient)


@programs.step(model=deeper_mlp)
def reduced_inside_hooks(model: nn.Module, shard: Any, rank: Rank) -> None:
    """A hook averages every gradient in the backward pass, whose order is that of all ranks."""

    def averaged(gradient: Tensor) -> Tensor:
        total = gradient.clone()
        dist.all_reduce(total)
        return total / rank.world_size

    for parameter in model.parameters():
        parameter.register_hook(averaged)
    mean_squared_error(model, shard).backward()


@programs.step()
def pickled_objects(model: nn.Module, shard: Any, rank: Rank) -> None:
    """all_gather_object collects dicts of gradients, and every rank takes their mean."""
    mean_squared_error(model, shard).backward()
    everywhere: list[Any] = [None] * rank.world_size
    dist.all_gather_object(everywhere, {name: p.grad for name, p in model.named_parameters()})
    for name, parameter in model.named_parameters():
        parameter.grad = torch.stack([of_rank[name] for of_rank in everywhere]).mean(0)


@programs.step(model=deeper_mlp)
def every_parameter_has_an_owner(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Each gradient is reduced to another rank, which divides it and broadcasts the mean."""
    mean_squared_error(model, shard).backward()
    for number, gradient in enumerate(gradients(model)):
        owner = number % rank.world_size
        dist.reduce(gradient, dst=owner)
        gradient /= rank.world_size
        dist.broadcast(gradient, src=owner)


@programs.step(dtype=torch.bfloat16)
def bfloat16_summed_in_float32(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Gradients are widened, averaged and rounded once."""
    mean_squared_error(model, shard).backward()
    for gradient in gradients(model):
        wide = gradient.float()
        dist.all_reduce(wide)
        gradient.copy_(wide / rank.world_size)


@programs.step(shards="14+6+4", layout="1x3")
def uneven_shards_weighted_after_backward(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Every gradient is multiplied by the rank's examples, and the sum divided by all."""
    mean_squared_error(model, shard).backward()
    examples = global_sum(len(shard["rows"]), rank)
    for gradient in gradients(model):
        gradient *= len(shard["rows"])
        dist.all_reduce(gradient)
        gradient /= examples


@programs.step(shards="12+12+0", layout="1x3")
def a_rank_without_examples_adds_zeros(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The last rank has nothing to do, and takes part in every sum with zeros."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    if len(shard["rows"]):
        mean_squared_error(model, shard).backward()
    for gradient in gradients(model):
        gradient *= len(shard["rows"]) / 24
        dist.all_reduce(gradient)


@programs.step()
def other_collectives_in_between(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Metrics, a barrier and a broadcast of the epoch run between backward and the average."""
    value = mean_squared_error(model, shard)
    value.backward()
    shown = torch.stack([value.detach(), torch.ones_like(value)])
    dist.all_reduce(shown)
    dist.barrier()
    dist.broadcast_object_list([{"epoch": 3}], src=0)
    average(model, rank)
