"""A variational autoencoder of spectra. Gradients are reduced as soon as they are there."""

import torch
import torch.distributed as dist
from torch import nn

from ddp_equivalence import Case

LINES, CODE = 12, 3
BETA = 0.3


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(LINES, 10), nn.Tanh(), nn.Linear(10, 2 * CODE))
        self.decode = nn.Sequential(nn.Linear(CODE, 10), nn.Tanh(), nn.Linear(10, LINES))

    def forward(self, spectra, noise):
        mean, log_variance = self.encode(spectra).chunk(2, -1)
        code = mean + noise * (log_variance / 2).exp()
        return self.decode(code), mean, log_variance


def spectra(generator):
    n = 12
    return {
        "spectra": torch.randn(n, LINES, generator=generator),
        "noise": torch.randn(n, CODE, generator=generator),
    }


def terms(model, batch):
    """The two parts of the bound, summed over the examples."""
    guess, mean, log_variance = model(batch["spectra"], batch["noise"])
    yield (guess - batch["spectra"]).square().sum() / 2
    yield BETA * (mean.square() + log_variance.exp() - 1 - log_variance).sum() / 2


def loss(model, batch):
    return sum(terms(model, batch)) / len(batch["spectra"])


class Overlap:
    """Starts to add up a gradient over the ranks when backward has accumulated it."""

    def __init__(self, model):
        self.works = []
        self.handles = [
            p.register_post_accumulate_grad_hook(self.start) for p in model.parameters()
        ]

    def start(self, p):
        self.works.append(dist.all_reduce(p.grad, async_op=True))

    def finish(self):
        for work in self.works:
            work.wait()
        self.works.clear()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.finish()
        for handle in self.handles:
            handle.remove()


def step(model, shard, rank):
    examples = len(shard["spectra"]) * rank.world_size
    with Overlap(model) as overlap:
        for term in terms(model, shard):
            (term / examples).backward(retain_graph=True)
            overlap.finish()


case = Case(model=Autoencoder, batch=spectra, loss=loss, layout="1x2")
