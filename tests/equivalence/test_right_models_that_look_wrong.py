"""Models and data that make a right step look wrong: unused, shared, frozen, ill-conditioned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ddp_equivalence import Case, Rank, assert_equivalent, check
from ddp_equivalence.ranks.lanes import missing

EXAMPLES, ROW, OUTPUTS = 24, 5, 3
LAYOUTS = ("2x2", "1+2")
DTYPES = (torch.float64, torch.float32, torch.bfloat16)

Model = Callable[[], nn.Module]
Batch = dict[str, Tensor]


def make_batch(generator: torch.Generator) -> Batch:
    return {
        "rows": torch.randn(EXAMPLES, ROW, generator=generator),
        "targets": torch.randn(EXAMPLES, OUTPUTS, generator=generator),
    }


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch["rows"]), batch["targets"])


def ddp(model: nn.Module, shard: Batch, rank: Rank) -> None:
    """DDP as it comes: equal shards of a mean."""
    wrapped = DistributedDataParallel(model)
    loss(wrapped, shard).backward()


def ddp_that_looks_for_unused(model: nn.Module, shard: Batch, rank: Rank) -> None:
    """What a rank does not use counts as zero there."""
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    loss(wrapped, shard).backward()


def ddp_that_leaves_buffers(model: nn.Module, shard: Batch, rank: Rank) -> None:
    """Buffers that nobody changes need not be broadcast."""
    wrapped = DistributedDataParallel(model, broadcast_buffers=False)
    loss(wrapped, shard).backward()


def by_hand(model: nn.Module, shard: Batch, rank: Rank) -> None:
    """Summed, then divided: where DDP divides before it sums."""
    loss(model, shard).backward()
    average(model, rank)


def average(model: nn.Module, rank: Rank) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= rank.world_size


def case_of(model: Model, layout: str, **changes: Any) -> Case:
    fields: dict[str, Any] = {"batch": make_batch, "loss": loss, "layout": layout}
    return Case(model=model, **(fields | changes))


class Branch(nn.Module):
    """Two of the examples pass a branch that the others never touch."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.branch = nn.Linear(ROW, OUTPUTS), nn.Linear(ROW, OUTPUTS)

    def forward(self, rows: Tensor) -> Tensor:
        outputs: Tensor = self.trunk(rows)
        chosen = (rows[:, 0] > 5).nonzero().squeeze(1)
        if len(chosen):
            outputs = outputs.index_add(0, chosen, self.branch(rows[chosen]))
        return outputs


def with_two_that_branch(generator: torch.Generator) -> Batch:
    batch = make_batch(generator)
    batch["rows"][-2:, 0] = 6.0
    return batch


class UsedTwice(nn.Module):
    """One layer is applied twice; another shares its weight under a second name."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.tied = nn.Linear(ROW, ROW), nn.Linear(ROW, ROW)
        self.tied.weight = self.layer.weight
        self.last = nn.Linear(ROW, OUTPUTS)

    def forward(self, rows: Tensor) -> Tensor:
        hidden = torch.tanh(self.layer(torch.tanh(self.layer(rows))))
        return self.last(self.tied(hidden))  # type: ignore[no-any-return]


def partly_frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(ROW, 7), nn.Tanh(), nn.Linear(7, OUTPUTS))
    model[0].weight.requires_grad_(False)
    model[2].bias.requires_grad_(False)
    return model


class ZeroGradient(nn.Module):
    """``gate`` is multiplied by zero: its gradient is zero, not None, on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.gate = nn.Linear(ROW, OUTPUTS), nn.Parameter(torch.randn(OUTPUTS))

    def forward(self, rows: Tensor) -> Tensor:
        return self.linear(rows) + 0.0 * self.gate  # type: ignore[no-any-return]


def batch_norm_in_eval() -> nn.Module:
    """Normalises with the statistics that it has, the same for every shard."""
    norm = nn.BatchNorm1d(7)
    norm.running_mean, norm.running_var = torch.randn(7), torch.rand(7) + 0.5
    return nn.Sequential(nn.Linear(ROW, 7), norm, nn.Tanh(), nn.Linear(7, OUTPUTS)).eval()


def dropout_in_eval() -> nn.Module:
    return nn.Sequential(nn.Linear(ROW, 7), nn.Dropout(0.5), nn.Linear(7, OUTPUTS)).eval()


class KeysOfAttention(nn.Module):
    """The gradient of the keys' bias is zero but for rounding: a softmax does not see it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.first, self.last = nn.Linear(1, 8), nn.Linear(8, OUTPUTS)

    def forward(self, rows: Tensor) -> Tensor:
        tokens = self.first(rows[..., None])
        mixed, _ = self.attention(tokens, tokens, tokens, need_weights=False)
        return self.last(mixed.mean(dim=1))  # type: ignore[no-any-return]


class Checkpointed(nn.Module):
    """Activations of the first part are computed again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(ROW, 7), nn.Tanh(), nn.Linear(7, 7))
        self.last = nn.Linear(7, OUTPUTS)

    def forward(self, rows: Tensor) -> Tensor:
        return self.last(checkpoint(self.first, rows, use_reentrant=False))  # type: ignore[no-any-return]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("step", [ddp, by_hand])
@pytest.mark.parametrize(
    "model",
    [
        UsedTwice,
        partly_frozen,
        ZeroGradient,
        batch_norm_in_eval,
        dropout_in_eval,
        KeysOfAttention,
        Checkpointed,
    ],
)
def test_a_right_step_is_the_big_batch_for_any_model(model: Model, step: Any, layout: str) -> None:
    assert_equivalent(case_of(model, layout), step)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_parameters_that_most_ranks_do_not_use_are_no_fault(layout: str) -> None:
    case = case_of(Branch, layout, batch=with_two_that_branch)
    assert_equivalent(case, ddp_that_looks_for_unused)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_buffers_that_are_not_broadcast_are_no_fault(layout: str) -> None:
    assert_equivalent(case_of(batch_norm_in_eval, layout), ddp_that_leaves_buffers)


def trains_a_static_graph(model: nn.Module, joined: Batch, rank: Rank) -> None:
    """Activation checkpointing under static_graph: two steps of plain SGD."""
    wrapped = DistributedDataParallel(model, static_graph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for half in range(2):
        optimizer.zero_grad()
        loss(wrapped, {key: values.chunk(2)[half] for key, values in joined.items()}).backward()
        optimizer.step()


def two_batches(generator: torch.Generator) -> Batch:
    first, second = make_batch(generator), make_batch(generator)
    return {key: torch.cat([first[key], second[key]]) for key in first}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_activation_checkpointing_in_a_static_graph_is_no_fault(layout: str) -> None:
    case = case_of(Checkpointed, layout, batch=two_batches)
    assert_equivalent(case, trains_a_static_graph, compare="update", steps=2)


class Mixed(nn.Module):
    """A float64 model with a part in float32, which a check with ``dtype=None`` keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(ROW, 7).double(), nn.Linear(7, OUTPUTS).float()

    def forward(self, rows: Tensor) -> Tensor:
        hidden = torch.tanh(self.wide(rows.to(self.wide.weight.dtype)))
        outputs: Tensor = self.narrow(hidden.to(self.narrow.weight.dtype))
        return outputs.to(rows.dtype)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("step", [ddp, by_hand])
def test_two_precisions_in_one_model_are_no_fault(step: Any, layout: str) -> None:
    assert_equivalent(case_of(Mixed, layout, dtype=None), step)


# Ill-conditioned: rounding is large beside the gradient, or the values far apart.


def scaled(factor: float) -> Model:
    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(ROW, 7), nn.ReLU(), nn.Linear(7, OUTPUTS))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(factor)
        return model

    build.__name__ = f"weights_times_{factor:g}"
    return build


def twenty_layers(bias: bool = False) -> nn.Module:
    """Each twice as large as what goes in: a gain of 2 to the power of 20."""
    layers = [nn.Linear(ROW, ROW, bias=bias) for _ in range(20)]
    for layer in layers:
        nn.init.orthogonal_(layer.weight, gain=2.0)
    return nn.Sequential(*layers, nn.Linear(ROW, OUTPUTS, bias=bias))


def twenty_layers_with_biases() -> nn.Module:
    """The gradient of a late bias is a millionth of that of the weights beside it."""
    return twenty_layers(bias=True)


def nearly_singular() -> nn.Module:
    """Rows of a weight that differ by a thousandth only."""
    model = nn.Sequential(nn.Linear(ROW, ROW, bias=False), nn.Linear(ROW, OUTPUTS, bias=False))
    with torch.no_grad():
        next(model.parameters()).copy_(torch.ones(ROW, ROW) + 1e-3 * torch.randn(ROW, ROW))
    return model


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("step", [ddp, by_hand])
@pytest.mark.parametrize(
    "model",
    [scaled(1e3), scaled(1e-3), twenty_layers, nearly_singular, KeysOfAttention],
    ids=lambda model: model.__name__,
)
def test_an_ill_conditioned_model_is_no_fault(
    model: Model, step: Any, dtype: torch.dtype, layout: str
) -> None:
    assert_equivalent(case_of(model, layout, dtype=dtype), step)


@pytest.mark.parametrize("step", [ddp, by_hand])
def test_a_small_gradient_beside_large_ones_is_seen_in_float64(step: Any) -> None:
    assert_equivalent(case_of(twenty_layers_with_biases, "1+2"), step)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("step", [ddp, by_hand])
def test_a_small_gradient_beside_large_ones_is_unknown_in_low_precision(
    step: Any, dtype: torch.dtype
) -> None:
    """Honest, and not "different": a limit of some eps of the whole gradient, which parameters
    with a true gradient of zero need, lies above a bias's whole gradient here.
    """
    verdict = check(case_of(twenty_layers_with_biases, "1+2", dtype=dtype), step)
    assert verdict.outcome == "unknown", verdict
    assert verdict.reason.startswith("the limit lies above the signal for "), verdict


def with_kinks(model: nn.Module, batch: Batch) -> Tensor:
    return F.smooth_l1_loss(model(batch["rows"]), batch["targets"], beta=1e-3)


def tiny_loss(model: nn.Module, batch: Batch) -> Tensor:
    return 1e-12 * loss(model, batch)


def loss_beside_a_large_constant(model: nn.Module, batch: Batch) -> Tensor:
    return loss(model, batch) + 1e6


def saturated(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(1e3 * model(batch["rows"]), batch["targets"].argmax(dim=1))


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=["float64", "float32"])
@pytest.mark.parametrize("loss", [with_kinks, tiny_loss, loss_beside_a_large_constant, saturated])
def test_a_loss_of_another_size_or_shape_is_no_fault(loss: Any, dtype: torch.dtype) -> None:
    def averaged(model: nn.Module, shard: Batch, rank: Rank) -> None:
        loss(model, shard).backward()
        average(model, rank)

    assert_equivalent(case_of(dropout_in_eval, "1+2", loss=loss, dtype=dtype), averaged)


def over_decades(decades: float) -> Callable[[torch.Generator], Batch]:
    """Examples whose inputs and targets lie up to so many decades apart."""

    def batch(generator: torch.Generator) -> Batch:
        exponents = torch.linspace(-decades / 2, decades / 2, EXAMPLES, dtype=torch.float64)
        exponents = exponents[torch.randperm(EXAMPLES, generator=generator)]
        return {name: values * 10 ** exponents[:, None] for name, values in plain.items()}

    plain = make_batch(torch.Generator().manual_seed(1))
    return batch


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("step", [ddp, by_hand])
@pytest.mark.parametrize(("dtype", "decades"), [(torch.float64, 40), (torch.float32, 30)])
def test_sums_over_many_decades_are_no_fault(
    dtype: torch.dtype, decades: float, step: Any, layout: str
) -> None:
    case = case_of(one_layer, layout, batch=over_decades(decades), dtype=dtype)
    assert_equivalent(case, step)


def one_layer() -> nn.Module:
    return nn.Linear(ROW, OUTPUTS)


def nearly_trained(distance: float) -> tuple[Model, Callable[[torch.Generator], Batch]]:
    """A model so near its optimum that gradients of examples cancel but for ``distance``."""
    rows = torch.randn(EXAMPLES, ROW, generator=torch.Generator().manual_seed(2)).double()
    noise = torch.randn(EXAMPLES, OUTPUTS, generator=torch.Generator().manual_seed(3)).double()
    residual = noise - rows @ torch.linalg.lstsq(rows, noise).solution

    def model() -> nn.Module:
        return nn.Linear(ROW, OUTPUTS, bias=False).double()

    def batch(generator: torch.Generator) -> Batch:
        weight = model_weight()
        targets = rows @ weight.T + residual + distance * rows @ torch.ones(ROW, OUTPUTS).double()
        return {"rows": rows, "targets": targets}

    def model_weight() -> Tensor:
        torch.manual_seed(0)
        return model().get_parameter("weight").detach()

    return model, batch


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("step", [ddp, by_hand])
@pytest.mark.parametrize(
    ("dtype", "distance"), [(torch.float64, 1e-3), (torch.float64, 1e-7), (torch.float32, 1e-3)]
)
def test_gradients_that_cancel_are_no_fault(
    dtype: torch.dtype, distance: float, step: Any, layout: str
) -> None:
    model, batch = nearly_trained(distance)
    assert_equivalent(case_of(model, layout, batch=batch, dtype=dtype), step)


def compiled(model: nn.Module, shard: Batch, rank: Rank) -> None:
    """The compiler splits the graph where DDP's buckets end; the sums are the same."""
    wrapped: Any = torch.compile(DistributedDataParallel(model), backend="aot_eager")
    loss(wrapped, shard).backward()


def test_a_compiled_model_is_no_fault() -> None:
    assert_equivalent(case_of(dropout_in_eval, "1x2"), compiled)


def batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(ROW, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, OUTPUTS))


def with_synchronised_statistics(model: nn.Module, shard: Batch, rank: Rank) -> None:
    """The statistics of all ranks together are those of the big batch."""
    wrapped = DistributedDataParallel(
        nn.SyncBatchNorm.convert_sync_batchnorm(model), device_ids=[rank.device]
    )
    loss(wrapped, shard).backward()


@pytest.mark.skipif(missing("nccl", 2) is not None, reason="SyncBatchNorm needs 2 CUDA devices")
def test_synchronised_batch_norm_is_no_fault() -> None:
    assert_equivalent(case_of(batch_norm, "1x2"), with_synchronised_statistics)
