"""Two-tower retrieval with the items of all ranks as negatives; repeated items are no negatives."""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_functional
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

EXAMPLES, USER_FEATURES, ITEMS, WIDTH, TEMPERATURE = 18, 6, 9, 5, 0.3


class TwoTower(nn.Module):
    def __init__(self):
        super().__init__()
        self.user_tower = nn.Sequential(nn.Linear(USER_FEATURES, 8), nn.ReLU(), nn.Linear(8, WIDTH))
        self.item_table = nn.Embedding(ITEMS, 8)
        self.item_tower = nn.Linear(8, WIDTH)

    def forward(self, users, items):
        user = F.normalize(self.user_tower(users), dim=-1)
        item = F.normalize(self.item_tower(torch.relu(self.item_table(items))), dim=-1)
        return user, item


def in_batch_softmax(user, item_ids, candidates, candidate_ids, labels):
    """Cross entropy over the candidates; the user's item elsewhere in the batch is masked."""
    logits = user @ candidates.T / TEMPERATURE
    repeated = item_ids[:, None] == candidate_ids[None, :]
    repeated[torch.arange(len(labels)), labels] = False
    return F.cross_entropy(logits.masked_fill(repeated, -torch.inf), labels)


def loss(model, batch):
    user, item = model(batch["users"], batch["items"])
    labels = torch.arange(len(user))
    return in_batch_softmax(user, batch["items"], item, batch["items"], labels)


def make_batch(generator):
    return {
        "users": torch.randn(EXAMPLES, USER_FEATURES, generator=generator),
        "items": torch.randint(ITEMS, (EXAMPLES,), generator=generator),
    }


case = Case(model=TwoTower, batch=make_batch, loss=loss, layout="1x3")


class CrossRankNegatives:
    def __init__(self, rank, world_size):
        self.rank, self.world_size = rank, world_size

    def gather_embeddings(self, embeddings):
        """The rank's own items come first, so that labels are 0, 1, 2, ..."""
        parts = list(dist_functional.all_gather(embeddings.contiguous()))
        own = parts.pop(self.rank)
        return torch.cat([own, *parts])

    def gather_ids(self, ids):
        parts = [torch.empty_like(ids) for _ in range(self.world_size)]
        dist.all_gather(parts, ids.contiguous())
        return torch.cat(parts)


class RetrievalTrainer:
    def __init__(self, model, rank):
        self.ddp = DistributedDataParallel(model)
        self.negatives = CrossRankNegatives(rank.rank, rank.world_size)

    def training_step(self, batch):
        user, item = self.ddp(batch["users"], batch["items"])
        return in_batch_softmax(
            user,
            batch["items"],
            candidates=self.negatives.gather_embeddings(item),
            candidate_ids=self.negatives.gather_ids(batch["items"]),
            labels=torch.arange(len(user)),
        )


def step(model, shard, rank):
    trainer = RetrievalTrainer(model, rank)
    trainer.training_step(shard).backward()
