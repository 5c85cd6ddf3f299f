"""A switch-style mixture-of-experts language model with a load-balancing loss over the global batch.
Experts are replicated; gradients are averaged by DDP."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from ddp_equivalence import Case

VOCAB, WIDTH, EXPERTS, LENGTH = 19, 10, 4, 5
BALANCE_COEF = 0.1


class SwitchFFN(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.w_in = nn.Parameter(torch.randn(EXPERTS, WIDTH, 14) * 0.3)
        self.w_out = nn.Parameter(torch.randn(EXPERTS, 14, WIDTH) * 0.3)

    def forward(self, x):
        probs = self.router(x).softmax(dim=-1)
        gate, index = probs.max(dim=-1)
        dispatch = F.one_hot(index, EXPERTS).to(x.dtype)
        hidden = F.relu(torch.einsum("btd,edh->bteh", x, self.w_in))
        outputs = torch.einsum("bteh,ehd->bted", hidden, self.w_out)
        mixed = (outputs * dispatch.unsqueeze(-1)).sum(dim=2)
        return x + gate.unsqueeze(-1) * mixed, probs, dispatch


class SwitchLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.position = nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.ffn = SwitchFFN()
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens):
        x = self.embed(tokens) + self.position
        x, probs, dispatch = self.ffn(x)
        return self.head(self.norm(x)), probs, dispatch


def build_model():
    return SwitchLM()


def lm_loss(logits, targets):
    return F.cross_entropy(logits.reshape(-1, VOCAB), targets.reshape(-1))


def loss(model, batch):
    logits, probs, dispatch = model(batch["tokens"])
    fraction = dispatch.mean(dim=(0, 1))
    importance = probs.mean(dim=(0, 1))
    balance = EXPERTS * (fraction * importance).sum()
    return lm_loss(logits, batch["targets"]) + BALANCE_COEF * balance


def make_batch(generator):
    rows = 12
    text = torch.randint(0, VOCAB, (rows, LENGTH + 1), generator=generator)
    return {"tokens": text[:, :-1].contiguous(), "targets": text[:, 1:].contiguous()}


case = Case(model=build_model, batch=make_batch, loss=loss, layout="1x4")


def load_balancing_loss(probs, dispatch):
    """fraction of tokens per expert times mean router probability per expert"""
    fraction = dispatch.mean(dim=(0, 1))  # tokens per expert
    importance = probs.mean(dim=(0, 1))
    return EXPERTS * torch.dot(fraction, importance)


def step(model, shard, rank):
    ddp = DDP(model)
    logits, probs, dispatch = ddp(shard["tokens"])
    nll = lm_loss(logits, shard["targets"])
    balance = load_balancing_loss(probs, dispatch)
    total = nll + BALANCE_COEF * balance
    total.backward()

    metrics = torch.stack([nll.detach(), balance.detach()])
    dist.all_reduce(metrics)
    metrics /= rank.world_size
    return
