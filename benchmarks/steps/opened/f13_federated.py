"""Federated round with secure aggregation: clients hide their updates behind pairwise masks."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from ddp_equivalence import Case


@dataclass(frozen=True)
class RoundConfig:
    number: int = 5
    mask_scale: float = 0.5
    features: int = 6
    classes: int = 3


CFG = RoundConfig()


class ClientModel(nn.Module):
    def __init__(self, cfg=CFG):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(cfg.features, 9), nn.Softplus(), nn.Linear(9, cfg.classes)
        )

    def forward(self, records):
        return self.net(records)


def client_loss(model, batch):
    return F.cross_entropy(model(batch["records"]), batch["labels"])


class PairwiseMasks:
    """A client adds the masks shared with later clients and subtracts those with earlier ones."""

    def __init__(self, client, clients, cfg=CFG):
        self.client = client
        self.clients = clients
        self.cfg = cfg

    def seed(self, peer):
        return (self.cfg.number * self.clients + self.client) * self.clients + peer

    def shared(self, peer, size):
        generator = torch.Generator().manual_seed(self.seed(peer))
        noise = torch.randn(size, generator=generator, dtype=torch.float64)
        return self.cfg.mask_scale * noise

    def apply(self, update):
        masked = update.clone()
        for peer in range(self.clients):
            if peer > self.client:
                masked += self.shared(peer, update.numel())
            elif peer < self.client:
                masked -= self.shared(peer, update.numel())
        return masked


class FederatedClient:
    def __init__(self, model, client, clients):
        self.model = model
        self.masks = PairwiseMasks(client, clients)

    def pull(self):
        with torch.no_grad():
            weights = parameters_to_vector(self.model.parameters())
            dist.broadcast(weights, src=0)
            vector_to_parameters(weights, self.model.parameters())

    def local_update(self, batch):
        self.model.zero_grad()
        client_loss(self.model, batch).backward()
        flat = torch.cat([p.grad.reshape(-1) for p in self.model.parameters()])
        return flat * len(batch["labels"])

    def aggregate(self, update, records):
        masked = self.masks.apply(update)
        dist.all_reduce(masked)
        count = torch.tensor([float(records)])
        dist.all_reduce(count)
        return masked / count.item()

    def run_round(self, batch):
        self.pull()
        update = self.local_update(batch)
        mean = self.aggregate(update, len(batch["labels"]))
        offset = 0
        for parameter in self.model.parameters():
            piece = mean[offset : offset + parameter.numel()]
            parameter.grad = piece.view_as(parameter).clone()
            offset += parameter.numel()


def make_batch(generator):
    return {
        "records": torch.randn(14, CFG.features, generator=generator),
        "labels": torch.randint(CFG.classes, (14,), generator=generator),
    }


case = Case(
    model=ClientModel, batch=make_batch, loss=client_loss, layout="1x3", shards="7+4+3"
)


def step(model, shard, rank):
    FederatedClient(model, rank.rank, rank.world_size).run_round(shard)
