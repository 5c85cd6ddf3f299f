"""Cox proportional hazards on tabular patients; the risk sets span all ranks."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_equivalence import Case


class RiskNet(nn.Module):
    def __init__(self, features=6, width=12):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(features, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        self.head = nn.Linear(width, 1, bias=False)

    def forward(self, x):
        return self.head(self.body(x)).squeeze(-1)


def make_batch(generator):
    n = 16
    return {
        "x": torch.randn(n, 6, generator=generator),
        "time": torch.rand(n, generator=generator) * 10,
        "event": (torch.rand(n, generator=generator) < 0.7).long(),
    }


def partial_likelihood(risk, time, event):
    """Breslow's negative log partial likelihood, per event."""
    at_risk = time[None, :] >= time[:, None]
    log_denominator = torch.logsumexp(risk[None, :].masked_fill(~at_risk, float("-inf")), dim=1)
    event = event.to(risk.dtype)
    return ((log_denominator - risk) * event).sum() / event.sum().clamp(min=1)


def loss(model, batch):
    return partial_likelihood(model(batch["x"]), batch["time"], batch["event"])


class GatherRows(torch.autograd.Function):
    """Concatenates the rows of all ranks and keeps the graph of this rank's part."""

    @staticmethod
    def forward(ctx, rows):
        parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, rows.contiguous())
        ctx.rows = rows.shape[0]
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        start = dist.get_rank() * ctx.rows
        grad = grad.contiguous()
        return grad[start : start + ctx.rows]


def gather_plain(values):
    parts = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, values)
    return torch.cat(parts)


class CoxTask:
    def __init__(self, model):
        self.ddp = DDP(model)

    def training_loss(self, shard):
        risk = GatherRows.apply(self.ddp(shard["x"]))
        return partial_likelihood(risk, gather_plain(shard["time"]), gather_plain(shard["event"]))


def step(model, shard, rank):
    task = CoxTask(model)
    task.training_loss(shard).backward()


case = Case(model=RiskNet, batch=make_batch, loss=loss)
