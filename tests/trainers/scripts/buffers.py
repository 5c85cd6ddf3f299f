"""VQ autoencoder with an EMA codebook, DDP on gloo.  torchrun --nproc-per-node 2 buffers.py"""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class EMAQuantizer(nn.Module):
    def __init__(self, n_codes=24, dim=8, decay=0.9, eps=1e-5):
        super().__init__()
        self.n_codes, self.decay, self.eps = n_codes, decay, eps
        codes = torch.randn(n_codes, dim)
        self.register_buffer("codebook", codes)
        self.register_buffer("ema_count", torch.ones(n_codes))
        self.register_buffer("ema_sum", codes.clone())

    def forward(self, z):
        flat = z.reshape(-1, z.size(-1))
        idx = torch.cdist(flat.detach(), self.codebook).argmin(1)
        q = F.embedding(idx, self.codebook).view_as(z)
        commit = F.mse_loss(z, q)  # the codebook is a buffer, only z gets gradient
        return z + (q - z).detach(), commit, flat.detach(), idx

    @torch.no_grad()
    def update(self, flat, idx):
        onehot = F.one_hot(idx, self.n_codes).to(flat.dtype)
        stats = torch.cat([onehot.sum(0)[:, None], onehot.t() @ flat], dim=1)  # [K, 1 + D]
        dist.all_reduce(stats, op=dist.ReduceOp.SUM)
        self.ema_count.mul_(self.decay).add_(stats[:, 0], alpha=1 - self.decay)
        self.ema_sum.mul_(self.decay).add_(stats[:, 1:], alpha=1 - self.decay)
        self.codebook.copy_(self.ema_sum / (self.ema_count + self.eps)[:, None])


class VQAutoencoder(nn.Module):
    def __init__(self, in_dim=32, hidden=64, slots=4, dim=8):
        super().__init__()
        self.slots, self.dim = slots, dim
        self.enc = nn.Sequential(nn.Linear(in_dim, hidden), nn.GELU(), nn.LayerNorm(hidden),
                                 nn.Linear(hidden, slots * dim))
        self.vq = EMAQuantizer(dim=dim)
        self.dec = nn.Sequential(nn.Linear(slots * dim, hidden), nn.GELU(), nn.Linear(hidden, in_dim))

    def forward(self, x):
        z = self.enc(x).view(-1, self.slots, self.dim)
        q, commit, flat, idx = self.vq(z)
        return self.dec(q.flatten(1)), commit, flat, idx


def make_data(n=256, dim=32, modes=10):
    g = torch.Generator().manual_seed(7)
    centres = 2 * torch.randn(modes, dim, generator=g)
    x = centres[torch.randint(modes, (n,), generator=g)] + 0.3 * torch.randn(n, dim, generator=g)
    x[101, 5] = float("nan")  # a dead sensor reading, like in the real recordings
    return TensorDataset(x)


def all_ranks_finite(loss):
    ok = torch.isfinite(loss.detach()).float()
    dist.all_reduce(ok, op=dist.ReduceOp.MIN)
    return bool(ok.item())


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=2)
    p.add_argument("--batch-size", type=int, default=32, help="global batch, split evenly over ranks")
    p.add_argument("--lr", type=float, default=2e-3)
    args = p.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)

    data = make_data()
    sampler = DistributedSampler(data, shuffle=True, seed=3, drop_last=True)
    loader = DataLoader(data, args.batch_size // world, sampler=sampler, drop_last=True)
    model = DDP(VQAutoencoder())
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)

    step = skipped = 0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for (x,) in loader:
            recon, commit, flat, idx = model(x)
            rec_loss = F.mse_loss(recon, x)
            loss = rec_loss + 0.25 * commit
            if not all_ranks_finite(loss):  # same decision everywhere, nobody waits in backward
                skipped += 1
                continue
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            model.module.vq.update(flat, idx)
            step += 1
            log = torch.stack([rec_loss.detach(), commit.detach()]) / world
            dist.all_reduce(log)
            if rank == 0:
                rec, com = log.tolist()
                used = int((model.module.vq.ema_count > 0.5).sum())
                print(f"epoch {epoch} step {step:3d} recon {rec:.6f} commit {com:.6f} codes {used}", flush=True)
    if rank == 0:
        print(f"done: {step} steps, {skipped} batches skipped")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
