"""A report on a cause points at the line of the user's code that is at fault, or that has a
property of the model or of the loss, and says what the line does.
"""

# mypy: disable-error-code="arg-type, operator, union-attr, assignment, index, misc, var-annotated"
# mypy: disable-error-code="no-any-return"
# Users write their steps without asking whether there is a gradient.

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.futures import Future
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ddp_equivalence import Case, check
from tests.diagnosis.names.small_case import average, under_ddp
from tests.package.pointed_at import (
    MARK,
    Rows,
    Step,
    checked,
    faulty_lines,
    make_rows,
    marked_case,
    mean_loss,
    notes,
    text_of,
)

pytestmark = pytest.mark.self_check

# Ranks that take wrong examples.


def loaded(batch: Rows, sampler: Any, size: int, drop_last: bool = False) -> Iterator[Rows]:
    data = TensorDataset(batch["x"], batch["y"])
    loader = DataLoader(data, batch_size=size, sampler=sampler, drop_last=drop_last)
    for inputs, targets in loader:
        yield {"x": inputs, "y": targets}


def no_sampler(model: nn.Module, batch: Rows, rank: Any) -> None:
    ddp = DistributedDataParallel(model)
    data = TensorDataset(batch["x"], batch["y"])
    loader = DataLoader(data, batch_size=len(data) // rank.world_size)  # the fault
    inputs, targets = next(iter(loader))
    outputs = ddp(inputs)
    loss = F.mse_loss(outputs, targets)
    loss.backward()


def sampler_that_pads(model: nn.Module, batch: Rows, rank: Any) -> None:
    ddp = DistributedDataParallel(model)
    data = TensorDataset(batch["x"], batch["y"])
    sampler = DistributedSampler(data, shuffle=False)  # the fault
    sampler.set_epoch(0)
    for part in loaded(batch, sampler, len(sampler)):
        loss = mean_loss(ddp, part)
        loss.backward()


def sampler_that_drops(model: nn.Module, batch: Rows, rank: Any) -> None:
    data = TensorDataset(batch["x"], batch["y"])
    sampler = DistributedSampler(data, shuffle=False, drop_last=True)  # the fault
    for part in loaded(batch, sampler, len(sampler), drop_last=True):
        mean_loss(model, part).backward()
    average(model, rank.world_size)


def train_on(model: nn.Module, mine: Rows, examples: int) -> None:
    """Every example counts 1 / examples."""
    errors = (model(mine["x"]) - mine["y"]).square().mean(1)
    (errors.sum() / examples).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)


def reader_of(rank: Any, examples: int) -> Callable[[Rows], Rows]:
    """A closure that knows the rank."""
    size = examples // rank.world_size
    begin = rank.local_rank * size  # the fault

    def read(batch: Rows) -> Rows:
        return {name: leaf[begin : begin + size] for name, leaf in batch.items()}

    return read


def in_a_closure(model: nn.Module, batch: Rows, rank: Any) -> None:
    read = reader_of(rank, len(batch["x"]))
    train_on(model, read(batch), len(batch["x"]))


class Stream:
    """Goes through the rows of a rank."""

    def __init__(self, batch: Rows, rank: Any) -> None:
        self.pairs = list(zip(batch["x"], batch["y"], strict=True))
        self.rank = rank

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from islice(self.pairs, self.rank.rank, None, self.rank.world_size)


def in_two_places(model: nn.Module, batch: Rows, rank: Any) -> None:
    stream = Stream(batch, rank)
    size, own = rank.world_size, rank.rank
    kept = [row for place, row in enumerate(stream) if place % size == own]  # the fault
    mine = {
        name: torch.stack(parts) for name, parts in zip("xy", zip(*kept, strict=True), strict=True)
    }
    train_on(model, mine, len(batch["x"]))


def loaded_at_once(batch: Rows, sampler: Any) -> Rows:
    data = TensorDataset(batch["x"], batch["y"])
    inputs, targets = next(iter(DataLoader(data, batch_size=len(data), sampler=sampler)))
    return {"x": inputs, "y": targets}


def in_a_sampler_of_too_many(model: nn.Module, batch: Rows, rank: Any) -> None:
    workers = rank.world_size * 2  # the fault
    sampler = DistributedSampler(batch["x"], num_replicas=workers, rank=rank.rank, shuffle=False)
    train_on(model, loaded_at_once(batch, sampler), len(batch["x"]))


def beside_another_fault(model: nn.Module, batch: Rows, rank: Any) -> None:
    in_a_closure(model, batch, rank)
    model[0].bias.grad[rank.rank] += 0.1


def right_shares_and_a_wrong_factor(model: nn.Module, batch: Rows, rank: Any) -> None:
    own = slice(int(rank), None, rank.world_size)
    train_on(model, {name: leaf[own] for name, leaf in batch.items()}, len(batch["x"]) * 3)


# Gradients or weights that ranks do not share.


def skipping_hook(state, bucket):  # type: ignore[no-untyped-def]
    buffer = bucket.buffer()
    if bucket.is_last():
        done: Future[Tensor] = Future()
        done.set_result(buffer)
        return done
    buffer /= dist.get_world_size()
    work = dist.all_reduce(buffer, async_op=True)  # the fault
    return work.get_future().then(lambda future: future.value()[0])


def hook_skips_a_bucket(model: nn.Module, batch: Rows, rank: Any) -> None:
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.0004)
    ddp.register_comm_hook(None, skipping_hook)
    for _ in range(3):
        ddp.zero_grad()
        loss = mean_loss(ddp, batch)
        loss.backward()


class Reducer:
    """Averages the gradients of a model in one group."""

    def __init__(self, model: nn.Module, group: Any, size: int) -> None:
        self.model = model
        self.group = group
        self.size = size

    def run(self) -> None:
        for parameter in self.model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad, group=self.group)
            parameter.grad /= self.size


def group_without_the_last(model: nn.Module, batch: Rows, rank: Any) -> None:
    workers = dist.new_group(list(range(rank.world_size)))
    others = dist.new_group(list(range(rank.world_size - 1)))  # the fault
    mean_loss(model, batch).backward()
    dist.barrier(workers)
    if rank.rank < rank.world_size - 1:
        reducer = Reducer(model, others, rank.world_size - 1)
        reducer.run()


def cleared_on_one_rank(model: nn.Module, batch: Rows, rank: Any) -> None:
    model.zero_grad()
    loss = mean_loss(model, batch)
    loss.backward()
    norm = sum(float(parameter.grad.norm()) for parameter in model.parameters())
    if norm > 1e9 or rank.rank == 2:
        model.zero_grad(set_to_none=False)  # the fault
    Reducer(model, None, rank.world_size).run()


def leaders_forget_a_node(model: nn.Module, batch: Rows, rank: Any) -> None:
    mean_loss(model, batch).backward()
    nodes = [[0, 1], [2, 3], [4, 5]]
    inside = [dist.new_group(ranks) for ranks in nodes]
    leaders = dist.new_group([ranks[0] for ranks in nodes[:2]])  # the fault
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=inside[rank.node])
        if rank in (0, 2):
            dist.all_reduce(parameter.grad, group=leaders)
        dist.broadcast(parameter.grad, nodes[rank.node][0], group=inside[rank.node])
        dist.broadcast(parameter.grad, 0)
        parameter.grad /= 4


def initialise(model: nn.Module) -> None:
    for layer in model.children():
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=0.2)  # the fault
            layer.bias.data.fill_(0.1)


def seeds_by_rank(model: nn.Module, batch: Rows, rank: Any) -> None:
    torch.manual_seed(7)
    torch.manual_seed(100 + rank.rank)
    initialise(model)
    loss = mean_loss(model, batch)
    loss.backward()
    average(model, rank.world_size)


def whole(gradient: Tensor) -> Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


class Meshes:
    """The meshes of a job."""

    def __init__(self, rank: Any) -> None:
        shape = rank.nodes, rank.local_world_size
        self.all = init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner"))

    @property
    def of_a_node(self) -> DeviceMesh:
        return self.all["inner"]


def shards_the_last_on_a_node(model: Any, shard: Rows, rank: Any) -> dict[str, Tensor]:
    meshes = Meshes(rank)
    for layer in list(model)[::2]:
        mesh = meshes.of_a_node if layer is model[-1] else meshes.all
        fully_shard(layer, mesh=mesh)
    sharded: Any = fully_shard(model, mesh=meshes.all)
    mean_loss(sharded, shard).backward()
    return {name: whole(one.grad) for name, one in sharded.named_parameters()}


def shards_all_on_a_node(model: Any, shard: Rows, rank: Any) -> dict[str, Tensor]:
    sharded: Any = fully_shard(model, mesh=Meshes(rank).of_a_node)  # the fault
    mean_loss(sharded, shard).backward()
    return {name: whole(one.grad) for name, one in sharded.named_parameters()}


# Properties of a model or of a loss, and random numbers.


class Normalised(nn.Module):
    """A linear layer, a batch norm and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 3)
        self.double()

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        hidden = torch.relu(hidden)
        hidden = self.norm(hidden)  # the fault
        outputs: Tensor = self.head(hidden)
        return outputs


class Dropping(nn.Module):
    """A linear layer, dropout and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(8, 3)
        self.double()

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(inputs))
        hidden = self.drop(hidden)
        outputs: Tensor = self.head(hidden)
        return outputs


def one_pass(model: nn.Module, batch: Rows, rank: Any) -> None:
    model.train()
    outputs = model(batch["x"])
    loss = F.mse_loss(outputs, batch["y"])
    loss.backward()
    average(model, rank.world_size)


def with_ddp(model: nn.Module, batch: Rows, rank: Any) -> None:
    ddp = DistributedDataParallel(model)
    loss = F.mse_loss(ddp(batch["x"]), batch["y"])
    loss.backward()


def seeded_alike(model: nn.Module, batch: Rows, rank: Any) -> None:
    torch.manual_seed(rank.rank)
    torch.randn(3)
    torch.manual_seed(1234)  # the fault
    one_pass(model, batch, rank)


def compared(model: nn.Module, batch: Rows) -> Tensor:
    """Each example must be nearer to its own target than to those of the others."""
    outputs = F.normalize(model(batch["x"]), dim=1)
    targets = F.normalize(batch["y"], dim=1)
    similar = outputs @ targets.T
    labels = torch.arange(len(outputs))
    return F.cross_entropy(similar / 0.5, labels)


class Gathering:
    """Computes one loss from the outputs of all ranks."""

    def __init__(self, model: nn.Module, rank: Any) -> None:
        self.model, self.rank = model, rank

    def gather(self, tensor: Tensor) -> Tensor:
        parts = [torch.empty_like(tensor) for _ in range(self.rank.world_size)]
        dist.all_gather(parts, tensor)  # the fault
        parts[self.rank.rank] = tensor
        return torch.cat(parts)

    def loss(self, batch: Rows) -> Tensor:
        outputs = self.model(batch["x"])
        outputs = self.gather(outputs)
        targets = self.gather(batch["y"])
        similar = F.normalize(outputs, dim=1) @ F.normalize(targets, dim=1).T
        return F.cross_entropy(similar / 0.5, torch.arange(len(similar)))


def gathers_without_gradient(model: nn.Module, batch: Rows, rank: Any) -> None:
    gathering = Gathering(model, rank)
    gathering.loss(batch).backward()
    average(model, rank.world_size)


def catalogue_loss(model: nn.Module, batch: Rows) -> Tensor:
    """The same as the catalogue's loss on batch statistics, as a user would write it."""
    outputs = model(batch["inputs"])
    error = F.mse_loss(outputs, batch["targets"])
    variance = outputs.var(dim=0, unbiased=False)  # the fault
    penalty = 0.25 * (1 - variance).square().mean()
    total: Tensor = error + penalty
    return total


def penalises_the_variance(model: nn.Module, batch: Rows, rank: Any) -> None:
    loss = catalogue_loss(model, batch)
    loss.backward()
    average(model, rank.world_size)


class Functional(nn.Module):
    """Two linear layers, and the function of torch that drops some of what is between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.drop = nn.Dropout(0.0)
        self.head = nn.Linear(8, 3)
        self.double()

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.drop(self.first(inputs))
        hidden = F.dropout(hidden, 0.4, self.training)
        outputs: Tensor = self.head(hidden)
        return outputs


class Layers(nn.Module):
    """Two linear layers. A subclass draws between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, rows: Tensor) -> Any:
        return self.last(self.changed(torch.tanh(self.first(rows))))

    def changed(self, hidden: Tensor) -> Tensor:
        return hidden


class Noisy(Layers):
    def changed(self, hidden: Tensor) -> Tensor:
        scale = torch.exp(hidden / 3)
        noise = torch.randn_like(hidden)
        return hidden + scale * noise


class DrawsWithNumpy(Layers):
    def changed(self, hidden: Tensor) -> Tensor:
        scales = np.random.uniform(0.5, 1.5, (len(hidden), 1))
        return hidden * torch.from_numpy(scales).to(hidden.dtype)


def at_a_random_time(model: nn.Module, rows: Rows) -> Tensor:
    times = torch.randint(1, 20, (len(rows["x"]), 1)) / 20
    return F.mse_loss(model(rows["x"] * times.to(rows["x"].dtype)), rows["y"])


def seeds_and_draws(model: Any, shard: Any, rank: Any) -> None:
    torch.manual_seed(3)  # the fault
    ddp = DistributedDataParallel(model)
    mean_loss(ddp, shard).backward()


ONE_NODE, TWO_NODES = marked_case("1x4"), marked_case("2x2")
THREE_NODES = marked_case("3x2", batch=partial(make_rows, count=18))
OWN, OWN_ON_NODES = marked_case("1x4", shards="own"), marked_case("2x2", shards="own")
OWN_TEN = marked_case("1x4", shards="own", batch=partial(make_rows, count=10))
NORMALISED, DROPPING = marked_case("1x4", model=Normalised), marked_case("1x4", model=Dropping)
STATISTICS = Case(model="mlp", loss="batch_statistics", layout="1x4")
NOISY, NUMPY = (marked_case("1x2", model=one) for one in (Noisy, DrawsWithNumpy))
AT_TIMES = marked_case("1x2", model=Layers, loss=at_a_random_time)
FUNCTIONAL, COMPARED = marked_case("1x4", model=Functional), marked_case("1x4", loss=compared)

LOCAL, DROPPED = "batch_norm_local_statistics", "examples_dropped"
LEFT_OUT, SAME_DROPOUT = "rank_left_out", "dropout_same_on_all_ranks"
NO_FAULT = "a property of the model, no fault"

POINTED_AT: list[Any] = [
    (OWN, no_sampler, "every_rank_same_data", "all 4 ranks read"),
    (OWN_TEN, sampler_that_pads, "sampler_padding_counted", "pads 10 examples by 2"),
    (OWN_TEN, sampler_that_drops, DROPPED, "leaves out 2 examples"),
    (OWN_ON_NODES, in_a_closure, "shares_overlap", "uses rank.local_rank"),
    (OWN_ON_NODES, in_two_places, DROPPED, "uses self.rank.rank"),
    (OWN_ON_NODES, in_a_sampler_of_too_many, DROPPED, "gives num_replicas"),
    (ONE_NODE, hook_skips_a_bucket, "bucket_not_reduced", "register_comm_hook(skipping_hook)"),
    (ONE_NODE, cleared_on_one_rank, LEFT_OUT, "clears gradients on rank 2"),
    (ONE_NODE, group_without_the_last, LEFT_OUT, ""),
    (THREE_NODES, leaders_forget_a_node, "node_left_out", "reduces without ranks 4, 5"),
    (ONE_NODE, seeds_by_rank, "weights_differ_between_ranks", "seeds differ between ranks"),
    (TWO_NODES, shards_all_on_a_node, "nodes_not_reduced", ""),
    (NORMALISED, one_pass, LOCAL, f"the examples of one rank or micro-batch: {NO_FAULT}"),
    (NORMALISED, with_ddp, LOCAL, f"the examples of one rank or micro-batch: {NO_FAULT}"),
    (
        STATISTICS,
        penalises_the_variance,
        "batch_statistics_local",
        "property of the loss, no fault",
    ),
    (DROPPING, seeded_alike, SAME_DROPOUT, "Dropout drop drops the same positions"),
    (NOISY, seeds_and_draws, SAME_DROPOUT, "draws the same numbers on every rank"),
    (COMPARED, gathers_without_gradient, "gather_without_gradient", "what it returns has none"),
]
"""Case, step, cause, and a part of the notes. A comment marks the faulty line."""


@pytest.mark.parametrize(("given", "step", "cause", "note"), POINTED_AT)
def test_the_line_is_pointed_at(given: Case, step: Step, cause: str, note: str) -> None:
    verdict = checked(given, step, cause)
    marked = [MARK in line for line in faulty_lines(verdict)]
    others = [False] if given is OWN_ON_NODES else []  # the line that takes the share
    assert marked == [True, *others], faulty_lines(verdict)
    assert note in notes(verdict)


@pytest.mark.parametrize(
    ("given", "step", "line", "note"),
    [
        (NOISY, under_ddp(mean_loss), "noise = torch.randn_like(hidden)", "others"),
        (
            NUMPY,
            under_ddp(mean_loss),
            "scales = np.random.uniform(0.5, 1.5, (len(hidden)",
            "others",
        ),
        (AT_TIMES, under_ddp(at_a_random_time), "times = torch.randint(1, 20, (len", "others"),
        (FUNCTIONAL, one_pass, "hidden = F.dropout(hidden, 0.4, self.training)", "other masks"),
    ],
)
def test_the_line_that_draws_is_shown(given: Case, step: Step, line: str, note: str) -> None:
    """The big batch cannot be given the numbers of two steps."""
    verdict = check(given, step, steps=2)
    assert verdict.causes == ("dropout_differs_from_reference",), verdict
    (faulty,) = faulty_lines(verdict)
    assert faulty.startswith(line)
    assert f"{note} for a shard than for the big batch" in notes(verdict)


def test_dropout_of_a_module_is_compared_with_the_masks_of_the_ranks_or_without_any() -> None:
    assert check(DROPPING, with_ddp).outcome == "same"
    assert check(DROPPING, with_ddp, steps=2).outcome == "same"


def test_a_report_without_a_cause_says_which_examples_were_read_twice_and_by_none() -> None:
    verdict = check(OWN_ON_NODES, beside_another_fault)
    assert (verdict.outcome, verdict.causes) == ("different", ()), verdict
    report = " ".join(str(verdict).split())
    assert "Ranks 0, 2 both read examples 0 to 3; ranks 1, 3 both 4 to 7" in report
    assert "no rank reads 8 to 15." in report


def test_shares_that_are_right_are_not_said_to_overlap() -> None:
    verdict = check(OWN_ON_NODES, right_shares_and_a_wrong_factor)
    assert verdict.outcome == "different"
    assert "read example" not in str(verdict)
    assert "no rank reads" not in str(verdict)


def test_a_rank_outside_the_group_of_the_others_is_not_said_to_have_reduced_anything() -> None:
    verdict = checked(ONE_NODE, group_without_the_last, "rank_left_out")
    assert "rank 3 reduced" not in verdict.full_report()


def test_the_wrapper_that_got_too_small_a_group_for_some_parameters_is_pointed_at() -> None:
    verdict = check(TWO_NODES, shards_the_last_on_a_node)
    assert verdict.outcome == "different"
    where = verdict.localisation.whereabouts
    assert where is not None, verdict
    assert where.headline == "some parameters are reduced in smaller groups", verdict
    assert set(where.parameters) == {"4.weight", "4.bias"}
    assert "fully_shard(layer, mesh=mesh)" in [text_of(one) for one in where.lines if one.is_fault]
    assert "with groups {0, 1} and {2, 3}, not with all 4 ranks" in where.sentence
