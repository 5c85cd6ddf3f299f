"""Steps that make DistributedDataParallel raise an error of its own, each with what mends it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ddp_equivalence import Rank
from tests.package.own_cases import build_model, loss

Step = Callable[[nn.Module, dict[str, Tensor], Rank], None]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(5, 7), nn.Linear(7, 5)

    def forward(self, rows: Tensor) -> Tensor:
        return rows + self.down(torch.tanh(self.up(rows)))  # type: ignore[no-any-return]


class Checkpointed(nn.Module):
    """``times``: how often the block runs in a forward pass."""

    def __init__(self, reentrant: bool = True, times: int = 1) -> None:
        super().__init__()
        self.stem, self.block, self.head = nn.Linear(5, 5), Block(), nn.Linear(5, 3)
        self.reentrant, self.times = reentrant, times

    def forward(self, rows: Tensor) -> Tensor:
        rows = self.stem(rows)
        for _ in range(self.times):
            rows = checkpoint(self.block, rows, use_reentrant=self.reentrant)
        return self.head(rows)  # type: ignore[no-any-return]


class CheckpointedFunction(Checkpointed):
    def forward(self, rows: Tensor) -> Tensor:
        rows = self.stem(rows)
        rows = checkpoint(lambda it: self.block(self.block(it)), rows, use_reentrant=self.reentrant)
        rows = checkpoint(self._run, rows, use_reentrant=self.reentrant)
        return self.head(rows)  # type: ignore[no-any-return]

    def _run(self, rows: Tensor) -> Tensor:
        return self.block(rows)  # type: ignore[no-any-return]


class RunsAgain(torch.autograd.Function):
    """Forgets what the block computes, and computes it again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, block: nn.Module) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.block = block
        with torch.no_grad():
            return block(rows)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        rows = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.block(rows)
        torch.autograd.backward(out, gradients[0])
        return rows.grad, None


class Reversible(Checkpointed):
    def forward(self, rows: Tensor) -> Tensor:
        rows = self.stem(rows)
        for _ in range(2):
            rows = RunsAgain.apply(rows, self.block)  # type: ignore[no-untyped-call]
        return self.head(rows)  # type: ignore[no-any-return]


class Heads(nn.Module):
    """A body with two heads, of which a call uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.aux = nn.Linear(5, 5), nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, rows: Tensor, aux: bool = False) -> Any:
        return (self.aux if aux else self.head)(torch.tanh(self.body(rows)))


class BothHeads(Heads):
    def forward(self, rows: Tensor, aux: bool = False) -> Any:
        hidden = torch.tanh(self.body(rows))
        return self.head(hidden), self.aux(hidden)


class Output:
    """No class in which DDP looks for tensors."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


class Opaque(Heads):
    def forward(self, rows: Tensor, aux: bool = False) -> Any:
        return Output(self.head(torch.tanh(self.aux(rows) @ self.aux.weight + self.body(rows))))


def loss_of_both(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    first, second = model(batch["rows"])
    return F.mse_loss(first, batch["targets"]) + F.mse_loss(second, batch["targets"])


def loss_of_two_calls(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    second = model(batch["rows"], aux=True)
    return F.mse_loss(model(batch["rows"]), batch["targets"]) + F.mse_loss(second, batch["targets"])


def loss_of_opaque(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(model(batch["rows"]).logits, batch["targets"])


def penalised(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    inner: Any = model.module if isinstance(model, DistributedDataParallel) else model
    weights = list(inner.aux.parameters())
    return loss(model, batch) + torch.cat([one.flatten() for one in weights]).square().sum()


def wrapped(of: Callable[..., Tensor] = loss, **options: Any) -> Step:
    """A plain step with these options of DDP."""

    def step(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
        ddp = DistributedDataParallel(model, **options)
        of(ddp, shard).backward()

    return step


def in_two_parts(
    uses_aux: Callable[[int, int], bool] = lambda part, rank: False,
    freezes: bool = False,
    syncs_first: bool = True,
    **options: Any,
) -> Step:
    """Accumulates over two parts. ``uses_aux``: of the part and the rank."""

    def step(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
        model.get_submodule("aux").requires_grad_(not freezes)
        ddp = DistributedDataParallel(model, **options)
        for part in range(2):
            rows, targets = (shard[name].chunk(2)[part] for name in ("rows", "targets"))
            ddp.require_backward_grad_sync = syncs_first or part == 1
            out = ddp(rows, aux=uses_aux(part, rank.rank))
            (F.mse_loss(out, targets) / 2).backward()

    return step


def backward_twice(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    first, second = ddp(shard["rows"])
    F.mse_loss(first, shard["targets"]).backward(retain_graph=True)
    F.mse_loss(second, shard["targets"]).backward()


def backward_of_each_call(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    first = F.mse_loss(ddp(shard["rows"]), shard["targets"])
    second = F.mse_loss(ddp(shard["rows"], aux=True), shard["targets"])
    first.backward()
    second.backward()


def steps_between(in_time: bool) -> Step:
    """``in_time``: each backward pass comes before the optimizer steps."""

    def step(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
        ddp = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.0)
        of_shard = loss(ddp, shard)
        if not in_time:
            of_shard.backward(retain_graph=True)
            optimizer.step()
            optimizer.zero_grad()
        of_shard.backward()
        optimizer.step()

    return step


def freezes(where: Callable[[int], bool]) -> Step:
    """``where``: the ranks that freeze the bias of the last layer."""

    def step(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
        model.get_parameter("2.bias").requires_grad_(not where(rank.rank))
        ddp = DistributedDataParallel(model)
        loss(ddp, shard).backward()

    return step


def widens(ranks: tuple[int, ...]) -> Step:
    """On these ranks the first layer has one row more."""

    def step(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
        if rank.rank in ranks:
            wide = nn.Parameter(torch.zeros(8, 5, dtype=torch.float64))
            model[0].weight = wide  # type: ignore[index]
        ddp = DistributedDataParallel(model)
        loss(ddp, shard).backward()

    return step


def frozen_part(wraps: bool) -> Step:
    """``wraps``: also the layer that is not trained."""

    def step(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
        first: Any = model[0].requires_grad_(False)  # type: ignore[index]
        if wraps:
            first = DistributedDataParallel(first)
        rest = DistributedDataParallel(model[1:])  # type: ignore[index]
        F.mse_loss(rest(first(shard["rows"])), shard["targets"]).backward()

    return step


def frozen_model() -> nn.Module:
    model: Any = build_model()
    model[0].requires_grad_(False)
    return model  # type: ignore[no-any-return]


def changes_weight(how: str) -> Step:
    def step(model: Any, shard: dict[str, Tensor], rank: Rank) -> None:
        ddp = DistributedDataParallel(model)
        if how == "weight":
            model[0].weight.mul_(1.0)
        elif how == "row":
            model[0].weight[0].mul_(1.0)
        else:
            with torch.no_grad():
                model[0].weight.mul_(1.0)
        loss(ddp, shard).backward()

    return step


def clears(how: str, **options: Any) -> Step:
    def step(model: Any, shard: dict[str, Tensor], rank: Rank) -> None:
        ddp = DistributedDataParallel(model, **options)
        for _ in range(2):
            for weight in ddp.parameters():
                if weight.grad is not None and how == "detach_":
                    weight.grad.detach_().zero_()
                elif how == "None":
                    weight.grad = None
                elif weight.grad is not None:
                    weight.grad = weight.grad.detach() * 0
            loss(ddp, shard).backward()

    return step


def on_device(device_ids: bool) -> Step:
    def step(model: Any, shard: dict[str, Tensor], rank: Rank) -> None:
        given = [rank.device] if rank.device.type == "cuda" else None
        ids: Any = [rank.local_rank] if device_ids else given
        ddp = DistributedDataParallel(model, device_ids=ids)
        loss(ddp, shard).backward()

    return step


def attribute_of(of_module: bool) -> Step:
    def step(model: Any, shard: dict[str, Tensor], rank: Rank) -> None:
        ddp: Any = DistributedDataParallel(model)
        assert (ddp.module if of_module else ddp).body.bias is not None
        loss(ddp, shard).backward()

    return step


def keeps_its_wrapper(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
    """The wrapper outlives the step."""
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    torch.kept = ddp  # type: ignore[attr-defined]
    loss(ddp, shard).backward()
