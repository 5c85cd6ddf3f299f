# VAE; gradients are summed over the ranks by hooks, while backward still runs.
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ddp_equivalence import Case

BETA = 0.3
MICRO = 2
PIXELS, LATENT = 15, 3


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(PIXELS, 12), nn.ELU(), nn.Linear(12, 2 * LATENT))
        self.decoder = nn.Sequential(nn.Linear(LATENT, 12), nn.ELU(), nn.Linear(12, PIXELS))

    def forward(self, x, noise):
        mean, log_var = self.encoder(x).chunk(2, dim=1)
        z = mean + noise * (log_var / 2).exp()
        return self.decoder(z), mean, log_var


def negative_elbo(model, batch):
    x, noise = batch
    logits, mean, log_var = model(x, noise)
    recon = F.binary_cross_entropy_with_logits(logits, x, reduction="none").sum(1)
    kl = 0.5 * (mean.square() + log_var.exp() - 1 - log_var).sum(1)
    return (recon + BETA * kl).mean()


def images(generator):
    return (
        torch.rand(16, PIXELS, generator=generator),
        torch.randn(16, LATENT, generator=generator),
    )


class HookedReducer:
    """Sums a gradient as soon as it is there.

    ``every``: how many backward passes belong to one step.
    """

    def __init__(self, model, every=1):
        self.every = every
        self.passes = {}
        self.handles = [
            p.register_post_accumulate_grad_hook(self.on_gradient) for p in model.parameters()
        ]

    def on_gradient(self, parameter):
        count = self.passes.get(parameter, 0) + 1
        self.passes[parameter] = count
        if count % self.every == 0:
            dist.all_reduce(parameter.grad)

    def close(self):
        for handle in self.handles:
            handle.remove()


case = Case(model=VAE, batch=images, loss=negative_elbo, layout="1x2")


def step(model, shard, rank):
    reducer = HookedReducer(model)
    for micro in zip(*(tensor.chunk(MICRO) for tensor in shard)):
        negative_elbo(model, micro).backward()
    reducer.close()
    with torch.no_grad():
        for p in model.parameters():
            p.grad /= rank.world_size * MICRO
