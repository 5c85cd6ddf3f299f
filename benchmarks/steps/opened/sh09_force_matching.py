"""Energy and force matching of a small pair potential, after a look at the validation error."""
import torch
import torch.distributed as dist
from torch import nn

from ddp_equivalence import Case

FORCE_WEIGHT = 5.0


class PairPotential(nn.Module):
    def __init__(self, species=4, dim=6, centers=8, cutoff=4.0):
        super().__init__()
        torch.manual_seed(13)
        self.cutoff, self.centers = cutoff, centers
        self.kind = nn.Embedding(species, dim)
        self.radial = nn.Linear(centers, dim)
        self.mix = nn.Linear(dim, dim)
        self.out = nn.Linear(dim, 1)

    def energy(self, z, pos):
        delta = pos.unsqueeze(2) - pos.unsqueeze(1)
        r = (delta.square().sum(-1) + 1e-3).sqrt()
        mu = torch.linspace(0.5, self.cutoff, self.centers, dtype=pos.dtype)
        basis = torch.exp(-2.0 * (r.unsqueeze(-1) - mu).square())
        envelope = 0.5 * (torch.cos(torch.pi * (r / self.cutoff).clamp(max=1.0)) + 1.0)
        envelope = envelope * (1 - torch.eye(z.shape[1], dtype=pos.dtype))
        h = self.kind(z)
        message = (self.radial(basis) * envelope.unsqueeze(-1) * h.unsqueeze(1)).sum(2)
        return self.out(torch.tanh(self.mix(h + message))).sum((1, 2))

    def forward(self, z, pos):
        pos = pos.detach().requires_grad_(True)
        e = self.energy(z, pos)
        # the second derivative is needed only when weights are trained on forces
        grad, = torch.autograd.grad(e.sum(), pos, create_graph=self.training, retain_graph=True)
        return e, -grad


def loss(model, batch):
    e, f = model(batch["z"], batch["pos"])
    per_atom = (e - batch["energy"]) / batch["z"].shape[1]
    return per_atom.square().mean() + FORCE_WEIGHT * (f - batch["force"]).square().mean()


def validate(model, frames):
    """Mean absolute force error over the ranks' frames, in the unit of the labels."""
    model.eval()
    _, force = model(frames["z"], frames["pos"])
    mae = (force.detach() - frames["force"]).abs().mean()
    dist.all_reduce(mae)
    return (mae / dist.get_world_size()).item()


def sanity_check(model, frames, limit=1e3):
    error = validate(model, {k: v[:2] for k, v in frames.items()})
    if not error < limit:
        raise RuntimeError(f"labels and model disagree by {error:.3g} before the first step: wrong units?")
    return error


class GradientAverager:
    def __init__(self, model):
        self.world = dist.get_world_size()
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(self.reduce)

    def reduce(self, p):
        dist.all_reduce(p.grad)
        p.grad.div_(self.world)


def step(model, shard, rank):
    sanity_check(model, shard)
    GradientAverager(model)
    loss(model, shard).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def frames(g):
    n, atoms = 8, 5
    return {
        "z": torch.randint(0, 4, (n, atoms), generator=g),
        "pos": 1.5 * torch.randn(n, atoms, 3, generator=g),
        "energy": torch.randn(n, generator=g),
        "force": 0.3 * torch.randn(n, atoms, 3, generator=g),
    }


case = Case(model=PairPotential, batch=frames, loss=loss, layout="1x2")
