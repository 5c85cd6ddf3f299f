"""Reductions by hand that a person gets wrong: what is reduced, over whom, how, and when."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
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

programs = Programs("reductions", right=False)


@programs.step()
def never_divided(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Gradients are summed, and nobody divides."""
    mean_squared_error(model, shard).backward()
    for gradient in gradients(model):
        dist.all_reduce(gradient)


@programs.step()
def divided_before_and_after(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The loss is divided by the world size, and the sum is divided once more."""
    (mean_squared_error(model, shard) / rank.world_size).backward()
    average(model, rank)


@programs.step(layout="2x2")
def divided_by_the_ranks_of_a_node(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The sum over all ranks is divided by the local world size."""
    mean_squared_error(model, shard).backward()
    for gradient in gradients(model):
        dist.all_reduce(gradient)
        gradient /= rank.local_world_size


@programs.step(layout="2x2")
def divided_by_the_number_of_nodes(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The sum over all ranks is divided by the number of nodes."""
    mean_squared_error(model, shard).backward()
    for gradient in gradients(model):
        dist.all_reduce(gradient)
        gradient /= rank.nodes


@programs.step(layout="1x3")
def divided_by_one_less(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The sum is divided by the highest rank instead of the number of ranks."""
    mean_squared_error(model, shard).backward()
    for gradient in gradients(model):
        dist.all_reduce(gradient)
        gradient /= rank.world_size - 1


@programs.step()
def reduced_before_backward(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The average comes before the backward pass, while gradients are still zero."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    average(model, rank)
    mean_squared_error(model, shard).backward()


@programs.step()
def not_waited_for(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Gradients are copied after async all-reduces have started, and before they are waited for."""
    mean_squared_error(model, shard).backward()
    buffers = [gradient.clone() for gradient in gradients(model)]
    copies = [buffer / rank.world_size for buffer in buffers]
    for work in [dist.all_reduce(buffer, async_op=True) for buffer in buffers]:
        work.wait()
    for gradient, copy in zip(gradients(model), copies, strict=True):
        gradient.copy_(copy)


@programs.step()
def largest_instead_of_sum(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The reduction takes the maximum over ranks."""
    mean_squared_error(model, shard).backward()
    for gradient in gradients(model):
        dist.all_reduce(gradient, op=dist.ReduceOp.MAX)


@programs.step(layout="1x3")
def median_over_ranks(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Every rank takes the median of the gathered gradients instead of their mean."""
    mean_squared_error(model, shard).backward()
    for gradient in gradients(model):
        everywhere = [torch.empty_like(gradient) for _ in range(rank.world_size)]
        dist.all_gather(everywhere, gradient)
        gradient.copy_(torch.stack(everywhere).median(0).values)


@programs.step()
def signs_averaged(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Only signs are exchanged, each with the mean size of the rank's gradient."""
    mean_squared_error(model, shard).backward()
    for gradient in gradients(model):
        gradient.copy_(gradient.sign() * gradient.abs().mean())
    average(model, rank)


@programs.step()
def largest_elements_exchanged(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Every rank sends its largest half of a gradient, and drops the rest."""
    mean_squared_error(model, shard).backward()
    for gradient in gradients(model):
        gradient *= gradient.abs() >= gradient.abs().median()
    average(model, rank)


@programs.step(layout="2x2")
def inside_the_node_only(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The group is that of the node, so nothing passes between nodes."""
    mean_squared_error(model, shard).backward()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    for gradient in gradients(model):
        dist.all_reduce(gradient, op=dist.ReduceOp.AVG, group=groups[rank.node])


@programs.step(layout="1+3")
def mean_of_the_means_of_nodes(model: nn.Module, shard: Any, rank: Rank) -> None:
    """A node of one rank counts as much as a node of three."""
    mean_squared_error(model, shard).backward()
    groups = [dist.new_group([0]), dist.new_group([1, 2, 3])]
    for gradient in gradients(model):
        dist.all_reduce(gradient, op=dist.ReduceOp.AVG, group=groups[rank.node])
        gradient *= 0.5 if rank.local_rank == 0 else 0
        dist.all_reduce(gradient)


@programs.step(layout="1x3")
def group_without_the_last_rank(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Ranks 0 and 1 average among themselves, and rank 2 is told the result."""
    mean_squared_error(model, shard).backward()
    group = dist.new_group([0, 1])
    for gradient in gradients(model):
        if rank.rank < 2:
            dist.all_reduce(gradient, op=dist.ReduceOp.AVG, group=group)
        dist.broadcast(gradient, src=0)


@programs.step()
def broadcast_from_rank_zero(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Every rank takes the gradients of rank 0."""
    mean_squared_error(model, shard).backward()
    for gradient in gradients(model):
        dist.broadcast(gradient, src=0)


@programs.step()
def reduced_and_not_sent_back(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Rank 0 holds the mean; the other ranks keep their own gradients."""
    mean_squared_error(model, shard).backward()
    for gradient in gradients(model):
        total = gradient.clone()
        dist.reduce(total, dst=0)
        gradient.copy_(total / rank.world_size if rank.rank == 0 else gradient)


@programs.step()
def copy_reduced(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The all-reduce works on copies, which nobody puts back."""
    mean_squared_error(model, shard).backward()
    for gradient in gradients(model):
        dist.all_reduce(gradient.clone(), op=dist.ReduceOp.AVG)


@programs.step()
def weights_reduced_instead(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The all-reduce is called on the parameters, and not on their gradients."""
    mean_squared_error(model, shard).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.data, op=dist.ReduceOp.AVG)


@programs.step()
def loss_value_reduced_only(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The value of the loss is averaged, which changes no gradient."""
    value = mean_squared_error(model, shard)
    value.backward()
    dist.all_reduce(value.detach(), op=dist.ReduceOp.AVG)
    model[0].bias.grad += 0 * global_sum(1, rank)


@programs.step()
def loss_summed_with_gradient(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The all_reduce of the loss multiplies its gradient by W, and nobody divides."""
    with_gradient.all_reduce(mean_squared_error(model, shard)).backward()
    average(model, rank)


@programs.step(model=deeper_mlp)
def first_layer_skipped(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The loop starts at the second parameter."""
    mean_squared_error(model, shard).backward()
    for gradient in gradients(model)[1:]:
        dist.all_reduce(gradient, op=dist.ReduceOp.AVG)


@programs.step(model=deeper_mlp)
def last_bias_skipped(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The loop ends before the last parameter."""
    mean_squared_error(model, shard).backward()
    for gradient in gradients(model)[:-1]:
        dist.all_reduce(gradient, op=dist.ReduceOp.AVG)


@programs.step(model=deeper_mlp)
def last_bucket_forgotten(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Full buckets of 40 numbers are averaged, and the rest that fills none is not."""
    mean_squared_error(model, shard).backward()
    vector = parameters_to_vector(gradients(model))
    for bucket in vector.split(40):
        if len(bucket) == 40:
            dist.all_reduce(bucket, op=dist.ReduceOp.AVG)
    torch.nn.utils.vector_to_parameters(vector, gradients(model))


@programs.step(model=deeper_mlp)
def taken_apart_in_another_order(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Gradients are joined in the order of the parameters, and taken apart from the last on."""
    mean_squared_error(model, shard).backward()
    vector = parameters_to_vector(gradients(model))
    dist.all_reduce(vector, op=dist.ReduceOp.AVG)
    torch.nn.utils.vector_to_parameters(vector, reversed(gradients(model)))


@programs.step()
def matrices_come_back_transposed(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The buffer holds transposed matrices, which are read as if they were not."""
    mean_squared_error(model, shard).backward()
    average(model, rank)
    for gradient in gradients(model):
        if gradient.ndim == 2:
            gradient.copy_(gradient.T.reshape(gradient.shape))


@programs.step()
def one_element_wrong(model: nn.Module, shard: Any, rank: Rank) -> None:
    """One number of one matrix is a millionth too large, on all ranks."""
    mean_squared_error(model, shard).backward()
    average(model, rank)
    model[0].weight.grad[2, 3] *= 1 + 1e-6


@programs.step()
def one_rank_negated(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The last rank maximises what the others minimise."""
    sign = -1 if rank.rank == rank.world_size - 1 else 1
    (sign * mean_squared_error(model, shard)).backward()
    average(model, rank)


@programs.step()
def averaged_twice_in_hooks(model: nn.Module, shard: Any, rank: Rank) -> None:
    """A hook averages every gradient, and the step divides by the world size again."""

    def averaged(gradient: Tensor) -> Tensor:
        total = gradient.clone()
        dist.all_reduce(total)
        return total / rank.world_size

    for parameter in model.parameters():
        parameter.register_hook(averaged)
    mean_squared_error(model, shard).backward()
    for gradient in gradients(model):
        gradient /= rank.world_size


@programs.step(shards="14+6+4", layout="1x3")
def uneven_shards_averaged(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Ranks with different numbers of examples count equally."""
    mean_squared_error(model, shard).backward()
    average(model, rank)
