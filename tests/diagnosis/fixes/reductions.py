"""Reductions with another factor or in other groups, or that leave ranks or parameters out."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.futures import Future
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from ddp_equivalence import Rank
from tests.diagnosis.fixes.programs import Batch, shows
from tests.diagnosis.names.small_case import average, case
from tests.package.own_cases import loss
from tests.package.pointed_at import marked_case, mean_loss


def total(model: nn.Module, batch: Batch) -> Tensor:
    """The sum of squares, where the mean is not taken."""
    return F.mse_loss(model(batch["rows"]), batch["targets"], reduction="sum")


SUM = case(loss=total)
NODES = case("2x2")
NODES_SUM = case("2x2", loss=total)


@shows(
    "mean_not_sum",
    "multiply the loss by 2: it is a sum.",
    {"total(ddp, shard)": "(2 * total(ddp, shard))"},
    SUM,
)
def sums_under_ddp(model: Any, shard: Batch, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    total(ddp, shard).backward()


@shows(
    "mean_not_sum",
    "do not divide the gradients by 2: the loss is a sum.",
    {"average(model, rank.world_size)": "average(model, 1)"},
    SUM,
)
def sums_and_averages(model: Any, shard: Batch, rank: Rank) -> None:
    total(model, shard).backward()
    average(model, rank.world_size)


@shows(
    "mean_not_sum",
    "multiply the loss by 2: it is a sum.",
    {"total(model, shard)": "(2 * total(model, shard))"},
    NODES_SUM,
)
def sums_in_nodes_and_averages_between(model: Any, shard: Batch, rank: Rank) -> None:
    inside = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    between = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    total(model, shard).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=inside[rank.node])
        dist.all_reduce(parameter.grad, group=between[rank.local_rank])
        parameter.grad /= rank.nodes


@shows(
    "mean_not_sum",
    "multiply the loss by 4: it is a sum.",
    {"(total(ddp, part) / 2)": "(4 * total(ddp, part) / 2)"},
    SUM,
)
def sums_micro_batches_and_divides(model: Any, shard: Batch, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    for rows, targets in zip(shard["rows"].chunk(2), shard["targets"].chunk(2), strict=True):
        part = {"rows": rows, "targets": targets}
        (total(ddp, part) / 2).backward()


class Tied(nn.Module):
    """Two layers with the same weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 5, bias=False), nn.Linear(5, 5, bias=False)
        self.second.weight = self.first.weight
        self.head = nn.Linear(5, 3)

    def forward(self, rows: Tensor) -> Any:
        return self.head(self.second(torch.tanh(self.first(rows))))


@shows(
    "reduced_more_than_once",
    "reduce each gradient once in a step, after the last backward that adds to it.",
    {"remove_duplicate=False": ""},
    case(model=Tied),
)
def reduces_a_tied_weight_twice(model: Any, shard: Batch, rank: Rank) -> None:
    loss(model, shard).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad /= rank.world_size
    for _, parameter in model.named_parameters(remove_duplicate=False):
        dist.all_reduce(parameter.grad)


@shows(
    "reduced_more_than_once",
    "reduce each gradient once in a step, after the last backward that adds to it.",
    {"        average": "    average"},
)
def reduces_after_each_micro_batch(model: Any, shard: Batch, rank: Rank) -> None:
    for rows, targets in zip(shard["rows"].chunk(2), shard["targets"].chunk(2), strict=True):
        (F.mse_loss(model(rows), targets) / 2 / rank.world_size).backward()
        average(model, 1)


@shows(
    "reduced_more_than_once",
    "reduce each gradient once in a step, after the last backward that adds to it.",
    {"    dist.all_reduce(model[0].weight.grad)\n": ""},
)
def reduces_the_first_layer_again(model: Any, shard: Batch, rank: Rank) -> None:
    loss(model, shard).backward()
    average(model, rank.world_size)
    dist.all_reduce(model[0].weight.grad)


@shows(
    "sum_not_mean",
    "divide the gradients by 2, the number of ranks, after the reduction.",
    {
        "dist.all_reduce(parameter.grad)": "dist.all_reduce(parameter.grad)\n"
        "        parameter.grad /= 2"
    },
)
def adds_up(model: Any, shard: Batch, rank: Rank) -> None:
    loss(model, shard).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)


@shows(
    "sum_not_mean",
    "do not multiply the loss by 2: DDP averages over the 2 ranks by itself.",
    {" * rank.world_size": ""},
)
def multiplies_the_loss_under_ddp(model: Any, shard: Batch, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    (loss(ddp, shard) * rank.world_size).backward()


@shows(
    "sum_not_mean",
    "do not multiply the gradients by 2: DDP averages over the 2 ranks by itself.",
    {"        parameter.grad *= rank.world_size\n": "        pass\n"},
)
def multiplies_the_gradients_under_ddp(model: Any, shard: Batch, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    loss(ddp, shard).backward()
    for parameter in model.parameters():
        parameter.grad *= rank.world_size


def summing(state, bucket):  # type: ignore[no-untyped-def]
    """A communication hook that sums."""
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


@shows(
    "sum_not_mean",
    "divide the gradients by 2, the number of ranks, in the hook.",
    {"done.value()[0]": "done.value()[0] / 2"},
    None,
    summing,
)
def adds_up_in_a_hook(model: Any, shard: Batch, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(None, summing)
    loss(ddp, shard).backward()


@shows(
    "sum_not_mean",
    "divide the gradients by 2, the number of ranks, after the reduction.",
    {"flat, gradients": "flat / 2, gradients"},
)
def adds_up_a_flat_buffer(model: Any, shard: Batch, rank: Rank) -> None:
    loss(model, shard).backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    flat = parameters_to_vector(gradients)
    dist.all_reduce(flat)
    vector_to_parameters(flat, gradients)


def full_gradients(model: nn.Module) -> dict[str, Any]:
    """The gradients of a model that is sharded."""
    sharded: dict[str, Any] = {name: p.grad for name, p in model.named_parameters()}
    return {name: gradient.full_tensor() for name, gradient in sharded.items()}


@shows("sum_not_mean", "do not multiply the loss by 2.", {" * rank.world_size": ""})
def multiplies_the_loss_under_fsdp(model: Any, shard: Batch, rank: Rank) -> Any:
    fully_shard(model)
    (loss(model, shard) * rank.world_size).backward()
    return full_gradients(model)


@shows(
    "sum_not_mean",
    "leave set_gradient_divide_factor out: it is for one module alone, and FSDP averages by "
    "itself.",
    {"    model.set_gradient_divide_factor(1.0)\n": ""},
)
def fsdp_does_not_divide(model: Any, shard: Batch, rank: Rank) -> Any:
    fully_shard(model)
    model.set_gradient_divide_factor(1.0)
    loss(model, shard).backward()
    return full_gradients(model)


@shows(
    "averaged_twice",
    "do not divide the loss by 2: DDP and ReduceOp.AVG average by themselves.",
    {" / rank.world_size": ""},
)
def divides_the_loss_under_ddp(model: Any, shard: Batch, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    (loss(ddp, shard) / rank.world_size).backward()


@shows(
    "averaged_twice",
    "do not divide the gradients by 2: DDP and ReduceOp.AVG average by themselves.",
    {"        parameter.grad /= rank.world_size": "        pass"},
)
def divides_the_gradients_under_ddp(model: Any, shard: Batch, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    loss(ddp, shard).backward()
    for parameter in model.parameters():
        parameter.grad /= rank.world_size


@shows("averaged_twice", "leave out one of the two divisions by 2.", {" / rank.world_size": ""})
def divides_the_loss_and_the_sum(model: Any, shard: Batch, rank: Rank) -> None:
    (loss(model, shard) / rank.world_size).backward()
    average(model, rank.world_size)


@shows(
    "averaged_twice",
    "do not divide the gradients by 4: DDP and ReduceOp.AVG average by themselves.",
    {"        parameter.grad /= rank.world_size\n": ""},
    NODES,
)
def divides_after_avg(model: Any, shard: Batch, rank: Rank) -> None:
    loss(model, shard).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)
        parameter.grad /= rank.world_size


@shows(
    "averaged_twice",
    "leave set_gradient_divide_factor out: it is for one module alone, and FSDP averages by "
    "itself.",
    {"    model.set_gradient_divide_factor(4.0)\n": ""},
)
def fsdp_divides_twice(model: Any, shard: Batch, rank: Rank) -> Any:
    fully_shard(model)
    model.set_gradient_divide_factor(4.0)
    loss(model, shard).backward()
    return full_gradients(model)


@shows(
    "averaged_twice",
    "leave set_gradient_divide_factor out: it is for one module alone, and FSDP averages by "
    "itself.",
    {"    model.set_gradient_divide_factor(4.0)\n": ""},
)
def fsdp_divides_the_blocks_once(model: Any, shard: Batch, rank: Rank) -> Any:
    fully_shard(model[0])
    fully_shard(model)
    model.set_gradient_divide_factor(4.0)
    loss(model, shard).backward()
    return full_gradients(model)


@shows(
    "averaged_twice",
    "call set_gradient_divide_factor on each module that fully_shard was given: it is for one "
    "module alone.",
    {"    model.set": "    model[0].set_gradient_divide_factor(1.0)\n    model.set"},
)
def fsdp_divides_the_blocks_and_the_loss(model: Any, shard: Batch, rank: Rank) -> Any:
    fully_shard(model[0])
    fully_shard(model)
    model.set_gradient_divide_factor(1.0)
    (loss(model, shard) / rank.world_size).backward()
    return full_gradients(model)


def dividing(state, bucket):  # type: ignore[no-untyped-def]
    """A communication hook that divides twice."""
    work = dist.all_reduce(bucket.buffer() / 2, async_op=True)
    return work.get_future().then(lambda done: done.value()[0] / 2)


@shows(
    "averaged_twice",
    "leave out a division by 2, or multiply the gradients by 2.",
    {"done.value()[0] / 2": "done.value()[0]"},
    None,
    dividing,
)
def divides_twice_in_a_hook(model: Any, shard: Batch, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(None, dividing)
    loss(ddp, shard).backward()


@shows(
    "last_window_divided_by_full",
    "divide by the number of micro-batches in this window, not by 4.",
    {"/ 4": "/ 2"},
)
def divides_micro_batches_by_ranks_too(model: Any, shard: Batch, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    for rows, targets in zip(shard["rows"].chunk(2), shard["targets"].chunk(2), strict=True):
        (F.mse_loss(ddp(rows), targets) / 4).backward()


@shows(
    "divided_by_local_world_size",
    "divide by 4, dist.get_world_size(), not by 2, the ranks of one node.",
    {"rank.local_world_size": "rank.world_size"},
    NODES,
)
def divides_by_the_ranks_of_a_node(model: Any, shard: Batch, rank: Rank) -> None:
    loss(model, shard).backward()
    average(model, rank.local_world_size)


def by_the_node(state, bucket):  # type: ignore[no-untyped-def]
    """A communication hook that divides by the ranks of a node."""
    devices = 2
    work = dist.all_reduce(bucket.buffer() / devices, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


@shows(
    "divided_by_local_world_size",
    "divide the gradients by 2 more.",
    {"done.value()[0]": "done.value()[0] / 2"},
    NODES,
    by_the_node,
)
def divides_by_the_node_in_a_hook(model: Any, shard: Batch, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(None, by_the_node)
    loss(ddp, shard).backward()


@shows(
    "divided_by_local_world_size",
    "divide by 4, dist.get_world_size(), not by 2, the ranks of one node.",
    {"rank.local_world_size": "rank.world_size"},
    NODES,
)
def divides_the_loss_by_the_ranks_of_a_node(model: Any, shard: Batch, rank: Rank) -> None:
    (loss(model, shard) / rank.local_world_size).backward()
    average(model, 1)


@shows(
    "",
    "leave this factor out, or put this factor into the loss of the big batch as well.",
    {" * rank.nodes": ""},
    NODES,
)
def multiplies_by_the_nodes(model: Any, shard: Batch, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    (loss(ddp, shard) * rank.nodes).backward()


@shows(
    "divided_by_local_world_size",
    "divide the gradients by 2 more.",
    {"op=add)": "op=add)\n        parameter.grad /= 2"},
    NODES,
)
def averages_in_nodes_and_adds_up_between(model: Any, shard: Batch, rank: Rank) -> None:
    inside = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    between = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    add, mean = dist.ReduceOp.SUM, dist.ReduceOp.AVG
    loss(model, shard).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=inside[rank.node], op=mean)
        dist.all_reduce(parameter.grad, group=between[rank.local_rank], op=add)


@shows(
    "divided_by_local_world_size",
    "divide the gradients by 2 more.",
    {
        "group=between[rank.local_rank])": "group=between[rank.local_rank])\n"
        "        parameter.grad /= 2"
    },
    NODES,
)
def wraps_in_nodes_and_adds_up_between(model: Any, shard: Batch, rank: Rank) -> None:
    inside = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    between = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    ddp = DistributedDataParallel(model, process_group=inside[rank.node])
    loss(ddp, shard).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=between[rank.local_rank])


@shows(
    "divided_by_wrong_number",
    "divide by 2, dist.get_world_size(), not by 8.",
    {"average(model, 8)": "average(model, 2)"},
)
def divides_by_the_ranks_of_another_run(model: Any, shard: Batch, rank: Rank) -> None:
    loss(model, shard).backward()
    average(model, 8)


@shows(
    "divided_by_wrong_number",
    "divide by 3, dist.get_world_size(), not by 4.",
    {"world_size + 1": "world_size"},
    case("1x3"),
)
def divides_by_one_more(model: Any, shard: Batch, rank: Rank) -> None:
    loss(model, shard).backward()
    workers = rank.world_size + 1
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad.div_(workers)


@shows(
    "reduced_in_wrong_group",
    "reduce over all 4 ranks, and divide by 4.",
    {", group=groups[rank.node]": "", "/= 2": "/= 4"},
    NODES,
)
def reduces_in_the_node(model: Any, shard: Batch, rank: Rank) -> None:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    loss(model, shard).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=groups[rank.node])
        parameter.grad /= 2


@shows(
    "reduced_in_wrong_group",
    "make DDP without process_group: it then averages over all 4 ranks.",
    {", process_group=groups[rank.rank % 2]": ""},
    NODES,
)
def wraps_in_pairs(model: Any, shard: Batch, rank: Rank) -> None:
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    ddp = DistributedDataParallel(model, process_group=groups[rank.rank % 2])
    loss(ddp, shard).backward()


@shows(
    "nodes_not_reduced",
    "make DDP without process_group: it then averages over all 4 ranks.",
    {", process_group=groups[rank.node]": ""},
    NODES,
)
def wraps_in_the_node(model: Any, shard: Batch, rank: Rank) -> None:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    ddp = DistributedDataParallel(model, process_group=groups[rank.node])
    loss(ddp, shard).backward()


@shows(
    "nodes_not_reduced",
    "give FSDP a mesh of all 4 ranks.",
    {'mesh=mesh["inside"]': "mesh=mesh"},
    NODES,
)
def shards_in_the_node(model: Any, shard: Batch, rank: Rank) -> Any:
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("between", "inside"))
    fully_shard(model, mesh=mesh["inside"])
    loss(model, shard).backward()
    return full_gradients(model)


@shows(
    "rank_left_out",
    "let the gradient of every rank count in an all_reduce of all 3, and divide by 3.",
    {"if rank.rank == 2:": "if False:"},
    case("1x3"),
)
def a_rank_gives_zeros(model: Any, shard: Batch, rank: Rank) -> None:
    loss(model, shard).backward()
    if rank.rank == 2:
        model.zero_grad(set_to_none=False)
    average(model, rank.world_size)


@shows(
    "rank_left_out",
    "let the gradient of every rank count in an all_reduce of all 3, and divide by 3.",
    {"[0, 1]": "[0, 1, 2]", "if rank.rank < 2:": "if True:"},
    case("1x3"),
)
def a_rank_returns_early(model: Any, shard: Batch, rank: Rank) -> None:
    workers = dist.new_group([0, 1])
    loss(model, shard).backward()
    if rank.rank < 2:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=workers)
            parameter.grad /= rank.world_size


@shows(
    "node_left_out",
    "let the gradient of every rank count in an all_reduce of all 4, and divide by 4.",
    {"if rank.node == 0:": "if True:"},
    NODES,
)
def only_the_first_node_counts(model: Any, shard: Batch, rank: Rank) -> None:
    loss(model, shard).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        own = torch.zeros_like(parameter.grad)
        if rank.node == 0:
            own = parameter.grad
        dist.all_reduce(own)
        parameter.grad = own / rank.world_size


@shows(
    "parameter_frozen_on_one_rank",
    "set requires_grad=True on all ranks for 0.weight.",
    {"if rank.rank == 1:": "if False:"},
)
def freezes_on_one_rank(model: Any, shard: Batch, rank: Rank) -> None:
    if rank.rank == 1:
        model[0].weight.requires_grad = False
    loss(model, shard).backward()
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    average(model, rank.world_size)


@shows(
    "reduced_buffer_not_used",
    "write what was reduced back into each .grad, as the mean over all ranks.",
    {"flat /= rank.world_size": "vector_to_parameters(flat / rank.world_size, gradients)"},
)
def does_not_copy_back(model: Any, shard: Batch, rank: Rank) -> None:
    loss(model, shard).backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    flat = parameters_to_vector(gradients)
    dist.all_reduce(flat)
    flat /= rank.world_size


@shows(
    "reduced_buffer_not_used",
    "write what was reduced back into each .grad, as the mean over all ranks.",
    {"mean = mean / rank.world_size": "parameter.grad = mean / rank.world_size"},
)
def reduces_clones(model: Any, shard: Batch, rank: Rank) -> None:
    loss(model, shard).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        mean = parameter.grad.clone()
        dist.all_reduce(mean)
        mean = mean / rank.world_size


@shows(
    "no_all_reduce",
    "all_reduce each gradient over 2 ranks, and divide by 2.",
    {".backward()": ".backward()\n    average(model, 2)"},
)
def reduces_nothing(model: Any, shard: Batch, rank: Rank) -> None:
    loss(model, shard).backward()


@shows(
    "no_all_reduce",
    "all_reduce each gradient over 2 ranks, and divide by 2.",
    {"rank.world_size > 4": "rank.world_size > 1"},
)
def reduces_only_in_large_runs(model: Any, shard: Batch, rank: Rank) -> None:
    loss(model, shard).backward()
    if rank.world_size > 4:
        average(model, rank.world_size)


def keeping(state, bucket):  # type: ignore[no-untyped-def]
    """A communication hook that reduces nothing."""
    done: Any = Future()
    done.set_result(bucket.buffer())
    return done


@shows(
    "no_all_reduce",
    "reduce each bucket in the hook, and divide by 2.",
    {"    done: Any": "    dist.all_reduce(bucket.buffer().div_(2))\n    done: Any"},
    None,
    keeping,
)
def a_hook_reduces_nothing(model: Any, shard: Batch, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(None, keeping)
    loss(ddp, shard).backward()


@shows(
    "raw_module_called",
    "call the DistributedDataParallel in the forward pass, not the module that it wraps.",
    {"loss(model,": "loss(ddp,"},
)
def calls_the_module(model: Any, shard: Batch, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    loss(model, shard).backward()
    assert ddp is not None


@shows(
    "raw_module_called",
    "call the DistributedDataParallel in the forward pass, not the module that it wraps.",
    {"ddp.module(rows)": "ddp(rows)"},
)
def calls_ddp_module(model: Any, shard: Batch, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    for rows, targets in zip(shard["rows"].chunk(2), shard["targets"].chunk(2), strict=True):
        (F.mse_loss(ddp.module(rows), targets) / 2).backward()


@shows(
    "wrapper_dropped",
    "keep the DistributedDataParallel in a variable that lives until backward has ended.",
    {
        "loss(DistributedDataParallel(model), shard)": "loss(ddp, shard)",
        "    value = ": "    ddp = DistributedDataParallel(model)\n    value = ",
    },
)
def drops_the_wrapper(model: Any, shard: Batch, rank: Rank) -> None:
    value = loss(DistributedDataParallel(model), shard)
    value.backward()


@shows(
    "parameters_reduced_not_gradients",
    "all_reduce parameter.grad, not parameter, and divide by 2.",
    {"parameter.data)": "parameter.grad)", "parameter.data /=": "parameter.grad /="},
)
def reduces_parameters(model: Any, shard: Batch, rank: Rank) -> None:
    loss(model, shard).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.data)
        parameter.data /= rank.world_size


@shows(
    "parameter_not_reduced",
    "all_reduce the gradient of 2.bias as others are, with the same divisor.",
    {"[:-1]": ""},
)
def forgets_the_last(model: Any, shard: Batch, rank: Rank) -> None:
    loss(model, shard).backward()
    for parameter in list(model.parameters())[:-1]:
        dist.all_reduce(parameter.grad)
        parameter.grad /= rank.world_size


@shows(
    "parameter_not_reduced",
    "do not let DDP ignore 0.weight.",
    {
        "    DistributedDataParallel._set_params_and_buffers_to_"
        'ignore_for_model(model, ["0.weight"])\n': ""
    },
)
def lets_ddp_ignore_one(model: Any, shard: Batch, rank: Rank) -> None:
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["0.weight"])
    ddp = DistributedDataParallel(model)
    loss(ddp, shard).backward()


@shows(
    "parameter_not_reduced",
    "wrap the model when it already has 0.bias, 0.weight with requires_grad=True, and use the"
    " wrapper in every iteration.",
    {
        "    ddp = DistributedDataParallel(model)\n": "",
        "    loss(": "    ddp = DistributedDataParallel(model)\n    loss(",
    },
)
def unfreezes_after_wrapping(model: Any, shard: Batch, rank: Rank) -> None:
    model[0].requires_grad_(False)
    ddp = DistributedDataParallel(model)
    model[0].requires_grad_(True)
    loss(ddp, shard).backward()


@shows(
    "ignored_parameter",
    "reduce 0.weight yourself, or do not ignore it.",
    {", ignored_params={model[0].weight}": ""},
)
def keeps_one_from_fsdp(model: Any, shard: Batch, rank: Rank) -> Any:
    fully_shard(model, ignored_params={model[0].weight})
    loss(model, shard).backward()
    gradients: dict[str, Any] = {n: p.grad for n, p in model.named_parameters()}
    return {n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in gradients.items()}


def skipping(state, bucket):  # type: ignore[no-untyped-def]
    """A communication hook that skips the last bucket."""
    done: Future[Tensor] = Future()
    if not bucket.is_last():
        dist.all_reduce(bucket.buffer().div_(2))
    done.set_result(bucket.buffer())
    return done


@shows(
    "bucket_not_reduced",
    "reduce every bucket in the hook, or use all parameters in every forward pass.",
    {"if not bucket.is_last():": "if True:"},
    marked_case("1x2"),
    skipping,
)
def a_hook_skips_a_bucket(model: Any, shard: Batch, rank: Rank) -> None:
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.0004)
    ddp.register_comm_hook(None, skipping)
    for _ in range(3):
        ddp.zero_grad()
        mean_loss(ddp, shard).backward()
