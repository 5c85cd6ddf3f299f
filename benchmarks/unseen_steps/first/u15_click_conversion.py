"""Multi-task recommender: click model on all impressions, conversion model on the clicked ones.
Impressions are in time order, so the newest have no clicks yet. Four ranks under DDP."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from ddp_equivalence import Case

CAMPAIGNS, DENSE, DIM = 20, 6, 6
CONVERSION_WEIGHT = 0.8


class SharedBottom(nn.Module):
    def __init__(self):
        super().__init__()
        self.campaign = nn.Embedding(CAMPAIGNS, DIM)
        self.bottom = nn.Sequential(nn.Linear(DIM + DENSE, 16), nn.ReLU())
        self.click = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 1))
        self.conversion = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, campaign, dense):
        shared = self.bottom(torch.cat([self.campaign(campaign), dense], dim=-1))
        return self.click(shared).squeeze(-1), self.conversion(shared).squeeze(-1)


def build_model():
    return SharedBottom()


def loss(model, batch):
    click_logit, conv_logit = model(batch["campaign"], batch["dense"])
    clicked = batch["clicked"]
    click_loss = F.binary_cross_entropy_with_logits(click_logit, clicked)
    conv_rows = F.binary_cross_entropy_with_logits(conv_logit, batch["converted"], reduction="none")
    conv_loss = (clicked * conv_rows).sum() / clicked.sum().clamp(min=1)
    return click_loss + CONVERSION_WEIGHT * conv_loss


def make_batch(generator):
    rows = 12
    clicked = (torch.rand(rows, generator=generator) < 0.5).double()
    clicked[:2] = 1
    clicked[9:] = 0
    converted = clicked * (torch.rand(rows, generator=generator) < 0.4).double()
    return {
        "campaign": torch.randint(0, CAMPAIGNS, (rows,), generator=generator),
        "dense": torch.randn(rows, DENSE, generator=generator),
        "clicked": clicked,
        "converted": converted,
    }


case = Case(model=build_model, batch=make_batch, loss=loss, layout="1x4")


class MultiTaskLoss:
    """Task losses which give the global means after DDP's average."""

    def __init__(self, world_size):
        self.world_size = world_size

    def global_clicks(self, clicked):
        clicks = clicked.sum().clamp(min=1)
        dist.all_reduce(clicks)
        return clicks

    def click(self, logit, shard):
        return F.binary_cross_entropy_with_logits(logit, shard["clicked"])

    def conversion(self, logit, shard):
        rows = F.binary_cross_entropy_with_logits(logit, shard["converted"], reduction="none")
        total = (rows * shard["clicked"]).sum()
        return total * self.world_size / self.global_clicks(shard["clicked"])


def step(model, shard, rank):
    ddp = DDP(model)
    tasks = MultiTaskLoss(rank.world_size)
    click_logit, conv_logit = ddp(shard["campaign"], shard["dense"])
    click_loss = tasks.click(click_logit, shard)
    conv_loss = tasks.conversion(conv_logit, shard)
    total = click_loss + CONVERSION_WEIGHT * conv_loss
    total.backward()
    return
