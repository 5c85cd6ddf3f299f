"""Masked + denoising autoencoder pre-training (start with torchrun --nproc-per-node 2)."""
import argparse
import math
import random

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Blobs(Dataset):
    """Gray images with one soft blob each; random crop and a random set of masked patches."""

    def __init__(self, n=96, size=20, crop=16, patch=4):
        rng = np.random.RandomState(1234)  # the data itself is the same everywhere
        yy, xx = np.mgrid[:size, :size]
        cy, cx = rng.uniform(4, 16, (2, n, 1, 1))
        width = rng.uniform(1.5, 5.0, (n, 1, 1))
        self.images = np.exp(-((yy - cy) ** 2 + (xx - cx) ** 2) / width**2).astype(np.float32)
        self.crop, self.patch = crop, patch

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        top, left = np.random.randint(0, self.images.shape[1] - self.crop + 1, size=2)
        img = self.images[i][top:top + self.crop, left:left + self.crop]
        g, p = self.crop // self.patch, self.patch
        patches = img.reshape(g, p, g, p).transpose(0, 2, 1, 3).reshape(g * g, p * p)
        ratio = random.uniform(0.2, 0.9)  # every image gets its own mask ratio
        hidden = random.sample(range(g * g), max(1, int(ratio * g * g)))
        mask = torch.zeros(g * g).index_fill_(0, torch.tensor(hidden), 1.0)
        return torch.from_numpy(patches), mask


class MaskedAutoencoder(nn.Module):
    def __init__(self, num_patches=16, patch_dim=16, dim=48, depth=2):
        super().__init__()
        self.embed = nn.Linear(patch_dim, dim)
        self.mask_token = nn.Parameter(torch.randn(1, 1, dim) * 0.02)
        self.pos = nn.Parameter(torch.randn(1, num_patches, dim) * 0.02)
        layer = nn.TransformerEncoderLayer(dim, 4, 2 * dim, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, depth, norm=nn.LayerNorm(dim), enable_nested_tensor=False)
        self.head = nn.Linear(dim, patch_dim)

    def forward(self, patches, mask):
        m = mask.unsqueeze(-1)
        x = self.embed(patches) * (1 - m) + self.mask_token * m
        return self.head(self.blocks(x + self.pos))


def reconstruction_loss(pred, target, mask):
    loss = (pred - target).pow(2).mean(-1)             # [N, L], one value per patch
    loss = (loss * mask).sum(1) / mask.sum(1)          # [N], mean over the hidden patches of each image
    return loss.mean()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--batch-size", type=int, default=16, help="per process")
    ap.add_argument("--blr", type=float, default=0.02, help="lr for a total batch of 256")
    ap.add_argument("--sigma", type=float, default=0.1, help="noise on the input")
    ap.add_argument("--clip", type=float, default=0.5)
    ap.add_argument("--seed", type=int, default=0)
    ap.add_argument("--output")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    seed = args.seed + rank  # masks, crops and noise must not repeat over the ranks
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    dataset = Blobs()
    sampler = DistributedSampler(dataset, shuffle=True, seed=args.seed, drop_last=True)
    loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler, drop_last=True)
    model = DDP(MaskedAutoencoder())
    lr = args.blr * args.batch_size * world / 256
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.05)
    total = args.epochs * len(loader)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 0.5 * (1 + math.cos(math.pi * s / total)))

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for it, (patches, mask) in enumerate(loader):
            noisy = patches + args.sigma * torch.randn(patches.shape)
            loss = reconstruction_loss(model(noisy, mask), patches, mask)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), args.clip)
            optimizer.step()
            scheduler.step()
            shown = loss.detach().clone()
            dist.all_reduce(shown)
            if rank == 0:
                print(f"epoch {epoch} it {it} loss {shown.item() / world:.4f} grad_norm {norm.item():.3f}", flush=True)
    if rank == 0 and args.output:
        torch.save({"model": model.module.state_dict()}, args.output)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
