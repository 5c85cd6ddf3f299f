"""A mixture-of-experts language model with a load-balancing loss over the tokens of all GPUs."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_equivalence import Case

PAD, VOCAB, DIM, EXPERTS, AUX = 0, 41, 16, 4, 0.2


class Router(nn.Linear):
    def forward(self, x):
        return super().forward(x).softmax(-1)


class SwitchLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.before = nn.GRU(DIM, DIM, batch_first=True)
        self.router = Router(DIM, EXPERTS)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(DIM, 24), nn.GELU(), nn.Linear(24, DIM)) for _ in range(EXPERTS)
        )
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, ids):
        x, _ = self.before(self.embed(ids))
        probs = self.router(x)
        gate = probs * F.one_hot(probs.argmax(-1), EXPERTS)
        y = torch.stack([expert(x) for expert in self.experts], dim=-1)
        return self.head(x + (y * gate[..., None, :]).sum(-1)), probs


def make_batch(generator):
    ids = torch.randint(1, VOCAB, (16, 9), generator=generator)
    length = torch.randint(3, 10, (16, 1), generator=generator)
    return ids.masked_fill(torch.arange(9) >= length, PAD)


def routed(probs, mask=None):
    """How many tokens went to each expert."""
    chosen = F.one_hot(probs.argmax(-1), EXPERTS)
    if mask is not None:
        chosen = chosen * mask[..., None]
    return chosen.flatten(0, -2).sum(0)


def mass(probs, mask):
    return (probs * mask[..., None]).flatten(0, -2).sum(0)


def next_token_sum(logits, ids):
    flat = logits[:, :-1].flatten(0, 1)
    return F.cross_entropy(flat, ids[:, 1:].flatten(), ignore_index=PAD, reduction="sum")


def loss(model, ids):
    logits, probs = model(ids)
    mask = ids != PAD
    tokens = mask.sum()
    balance = EXPERTS * (routed(probs, mask) / tokens * mass(probs, mask) / tokens).sum()
    return next_token_sum(logits, ids) / mask[:, 1:].sum() + AUX * balance


case = Case(model=SwitchLM, batch=make_batch, loss=loss, layout="2x2")


class ExpertLoad:
    """Keeps count of where tokens go: over all ranks, because rare experts need many tokens."""

    def __init__(self, process_group=None):
        self.group = process_group

    def total(self, value):
        value = value.clone()
        dist.all_reduce(value, group=self.group)
        return value

    def fractions(self, probs, mask):
        return self.total(routed(probs)) / self.total(mask.sum())

    def loss(self, probs, mask):
        shares = mass(probs, mask) / self.total(mask.sum())  # the part of the own tokens
        return EXPERTS * (self.fractions(probs, mask) * shares).sum()


def step(model, ids, rank):
    ddp, load = DDP(model), ExpertLoad()
    logits, probs = ddp(ids)
    mask = ids != PAD
    main = next_token_sum(logits, ids) / load.total(mask[:, 1:].sum())
    value = main + AUX * load.loss(probs, mask)
    (value * rank.world_size).backward()
