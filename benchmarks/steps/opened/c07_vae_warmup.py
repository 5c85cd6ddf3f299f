"""A VAE whose KL weight grows with the number of examples seen."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

BATCH = 16
PIXELS, LATENT = 12, 3


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.Linear(PIXELS, 20)
        self.mu = nn.Linear(20, LATENT)
        self.logvar = nn.Linear(20, LATENT)
        self.dec = nn.Sequential(nn.Linear(LATENT, 20), nn.ReLU(), nn.Linear(20, PIXELS))

    def forward(self, x, eps):
        h = torch.tanh(self.enc(x))
        mu, logvar = self.mu(h), self.logvar(h)
        z = mu + eps * (0.5 * logvar).exp()
        return self.dec(z), mu, logvar


class KLWarmup:
    """Linear in examples, from 0 to `final` within `examples`."""

    def __init__(self, examples=64, final=1.0, offset=8):
        self.examples, self.final, self.seen = examples, final, offset

    def advance(self, count):
        self.seen += count
        return self.weight()

    def weight(self):
        return self.final * min(1.0, self.seen / self.examples)


def draw(generator):
    return {
        "x": torch.rand(BATCH, PIXELS, generator=generator).round(),
        "eps": torch.randn(BATCH, LATENT, generator=generator),
    }


def terms(model, batch):
    recon, mu, logvar = model(batch["x"], batch["eps"])
    nll = F.binary_cross_entropy_with_logits(recon, batch["x"], reduction="none").sum(1)
    kl = -0.5 * (1 + logvar - mu.square() - logvar.exp()).sum(1)
    return nll.mean(), kl.mean()


def reference(model, batch):
    beta = KLWarmup().advance(len(batch["x"]))
    nll, kl = terms(model, batch)
    return nll + beta * kl


case = Case(model=VAE, batch=draw, loss=reference, layout="2x2")


class Loop:
    def __init__(self, model, rank):
        self.rank = rank
        self.ddp = DistributedDataParallel(model)
        self.warmup = KLWarmup()

    def on_batch(self, batch):
        self.beta = self.warmup.advance(len(batch["x"]))

    def run(self, batches):
        for batch in batches:
            self.on_batch(batch)
            nll, kl = terms(self.ddp, batch)
            total = nll + self.beta * kl
            total.backward()


def step(model, shard, rank):
    Loop(model, rank).run([shard])
