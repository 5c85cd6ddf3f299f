"""Neural solver for a 1-D Burgers flow whose grid is cut into one piece per rank; convolutions read a few
cells of the neighbours' pieces (zero outside the physical domain)."""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ddp_equivalence import Case

HALO = 2


def swap_with_neighbours(to_left, to_right):
    """Send one strip each way; returns (strip of the left neighbour, strip of the right neighbour)."""
    r, n = dist.get_rank(), dist.get_world_size()
    from_left, from_right = torch.zeros_like(to_left), torch.zeros_like(to_right)
    ops = []
    if r > 0:
        ops += [dist.P2POp(dist.isend, to_left.contiguous(), r - 1), dist.P2POp(dist.irecv, from_left, r - 1)]
    if r < n - 1:
        ops += [dist.P2POp(dist.isend, to_right.contiguous(), r + 1), dist.P2POp(dist.irecv, from_right, r + 1)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return from_left, from_right


class HaloPad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, u):
        left, right = swap_with_neighbours(u[..., :HALO], u[..., -HALO:])
        return torch.cat([left, u, right], dim=-1)

    @staticmethod
    def backward(ctx, grad):
        # strips that belong to the neighbours go back to their owners
        from_left, from_right = swap_with_neighbours(grad[..., :HALO], grad[..., -HALO:])
        inner = grad[..., HALO:-HALO].clone()
        inner[..., :HALO] += from_left
        inner[..., -HALO:] = from_right
        return inner


class BurgersNet(nn.Module):
    def __init__(self, width=6, depth=3, dt=0.1):
        super().__init__()
        torch.manual_seed(5)
        self.dt = dt
        self.lift = nn.Conv1d(1, width, 1)
        self.mix = nn.ModuleList(nn.Conv1d(width, width, 2 * HALO + 1) for _ in range(depth))
        self.project = nn.Conv1d(width, 1, 1)

    def forward(self, u, pad=lambda t: F.pad(t, (HALO, HALO))):
        h = self.lift(u)
        for conv in self.mix:
            h = h + torch.tanh(conv(pad(h)))
        return u + self.dt * self.project(h)


def rollout(model, u0, steps, **kw):
    states = []
    for _ in range(steps):
        u0 = model(u0, **kw)
        states.append(u0)
    return torch.stack(states, dim=1)


def loss(model, batch):
    u0, trajectory = batch
    return (rollout(model, u0, trajectory.shape[1]) - trajectory).square().mean()


def all_samples(t):
    parts = [torch.empty_like(t) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, t.contiguous())
    return torch.cat(parts)


def step(model, shard, rank):
    u0, trajectory = (all_samples(t) for t in shard)
    cells = u0.shape[-1] // rank.world_size
    lo = rank.rank * cells
    mine, target = u0[..., lo:lo + cells], trajectory[..., lo:lo + cells]
    error = rollout(model, mine, trajectory.shape[1], pad=HaloPad.apply) - target
    (error.square().sum() / trajectory.numel()).backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
    return {name: p.grad for name, p in model.named_parameters()}


def flows(g):
    x = torch.linspace(0, 1, 24)
    phase, amp = torch.rand(8, 1, 1, generator=g), 0.5 + torch.rand(8, 1, 1, generator=g)
    u0 = amp * torch.sin(6.2832 * (x + phase))
    later = torch.stack([u0 * 0.9 + 0.1 * torch.randn(8, 1, 24, generator=g) for _ in range(2)], dim=1)
    return u0, later


case = Case(model=BurgersNet, batch=flows, loss=loss, layout="1x2")
