"""A sequence tagger with ZeRO-1 style ownership: each parameter belongs to one rank, gradients are
reduced to the owner and then handed out again for the logging of norms and the replicated optimiser."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from ddp_equivalence import Case

VOCAB, TAGS, WIDTH, LENGTH = 25, 6, 9, 7


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.rnn = nn.GRU(WIDTH, 11, batch_first=True)
        self.norm = nn.LayerNorm(11)
        self.hidden = nn.Linear(11, 13)
        self.out = nn.Linear(13, TAGS)

    def forward(self, words):
        states, _ = self.rnn(self.embed(words))
        return self.out(F.gelu(self.hidden(self.norm(states))))


def build_model():
    return Tagger()


def tag_loss(model, batch):
    logits = model(batch["words"])
    return F.cross_entropy(logits.flatten(0, 1), batch["tags"].flatten())


def loss(model, batch):
    return tag_loss(model, batch)


def make_batch(generator):
    rows = 14
    return {
        "words": torch.randint(0, VOCAB, (rows, LENGTH), generator=generator),
        "tags": torch.randint(0, TAGS, (rows, LENGTH), generator=generator),
    }


case = Case(model=build_model, batch=make_batch, loss=loss, layout="1x2")


class OwnerSharding:
    """Greedy assignment of the parameters to ranks by size."""

    def __init__(self, module, world_size):
        self.params = [p for p in module.parameters() if p.requires_grad]
        self.world_size = world_size
        self.owner = self._assign()

    def _assign(self):
        load = [0] * self.world_size
        owner = [0] * len(self.params)
        by_size = sorted(range(len(self.params)), key=lambda i: -self.params[i].numel())
        for i in by_size:
            target = min(range(self.world_size), key=load.__getitem__)
            owner[i] = target
            load[target] += self.params[i].numel()
        return owner

    @torch.no_grad()
    def reduce_to_owners(self, my_rank):
        for i, p in enumerate(self.params):
            buffer = p.grad.div(self.world_size)
            dist.reduce(buffer, dst=self.owner[i], op=dist.ReduceOp.SUM)
            if my_rank == self.owner[i]:
                p.grad.copy_(buffer)

    @torch.no_grad()
    def broadcast_from_owners(self):
        for i, p in enumerate(self.params):
            src = i % self.world_size
            dist.broadcast(p.grad, src=src)


@torch.no_grad()
def grad_norm(params):
    return torch.stack([p.grad.norm() for p in params]).norm()


def step(model, shard, rank):
    sharding = OwnerSharding(model, rank.world_size)
    model.zero_grad(set_to_none=True)
    train_loss = tag_loss(model, shard)
    train_loss.backward()
    sharding.reduce_to_owners(rank.rank)
    sharding.broadcast_from_owners()
    return
