"""Tiny causal LM, DDP + gradient accumulation.  torchrun --nproc-per-node 2 clips.py"""
import argparse
import math
from contextlib import nullcontext
from itertools import islice

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

PAD, IGNORE, VOCAB, MAX_LEN = 0, -100, 64, 32


def noisy_chains(n, seed=0):
    """Affine chains over the vocabulary with some noise; lengths vary a lot."""
    g, seqs = torch.Generator().manual_seed(seed), []
    for _ in range(n):
        length = int(4 + (MAX_LEN - 4) * torch.rand(1, generator=g).item() ** 2)
        x = torch.randint(1, VOCAB, (length + 1,), generator=g)
        for t in range(length):
            if torch.rand(1, generator=g).item() > 0.15:
                x[t + 1] = (x[t] * 5 + 3) % (VOCAB - 1) + 1
        seqs.append(x)
    return seqs


def collate(seqs):
    inputs = nn.utils.rnn.pad_sequence([s[:-1] for s in seqs], True, PAD)
    labels = nn.utils.rnn.pad_sequence([s[1:] for s in seqs], True, IGNORE)
    return inputs, labels


class TinyLM(nn.Module):
    def __init__(self, dim=32, heads=4, depth=2):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, dim, padding_idx=PAD)
        self.pos = nn.Embedding(MAX_LEN, dim)
        layer = nn.TransformerEncoderLayer(dim, heads, 4 * dim, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, depth, norm=nn.LayerNorm(dim), enable_nested_tensor=False)
        self.head = nn.Linear(dim, VOCAB, bias=False)

    def forward(self, x):
        T = x.size(1)
        # padding is on the right, so the causal mask already hides it from real tokens
        mask = torch.ones(T, T, dtype=torch.bool, device=x.device).triu(1)
        h = self.tok(x) + self.pos(torch.arange(T, device=x.device))
        return self.head(self.blocks(h, mask=mask))


def sum_over_ranks(t):
    dist.all_reduce(t)
    return t


def tokens_per_rank(window):
    """Valid tokens of the window; DDP averages gradients over ranks, so we want the mean count."""
    n = torch.stack([(labels != IGNORE).sum() for _, labels in window]).sum().float()
    return sum_over_ranks(n) / dist.get_world_size()


def main():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--epochs", type=int, default=2)
    p.add_argument("--micro-batch", type=int, default=4, help="sequences per rank")
    p.add_argument("--accum", type=int, default=4)
    p.add_argument("--lr", type=float, default=3e-3)
    args = p.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(1234)

    data = noisy_chains(176)
    sampler = DistributedSampler(data, shuffle=True, seed=0, drop_last=True)
    loader = DataLoader(data, args.micro_batch, sampler=sampler, collate_fn=collate, drop_last=True)
    model = DDP(TinyLM())
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    total, warmup = args.epochs * math.ceil(len(loader) / args.accum), 3
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: (s + 1) / warmup if s < warmup else
                                              0.5 * (1 + math.cos(math.pi * (s - warmup) / (total - warmup))))
    step = 0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        batches = iter(loader)
        while window := list(islice(batches, args.accum)):
            denom = tokens_per_rank(window).clamp(min=1)
            stats = torch.zeros(2)  # summed loss, valid tokens
            for i, (inputs, labels) in enumerate(window):
                with nullcontext() if i == len(window) - 1 else model.no_sync():
                    logits = model(inputs)
                    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum")
                    (loss / denom).backward()
                stats += torch.stack([loss.detach(), (labels != IGNORE).sum()])
            norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.5)
            opt.step()
            sched.step()
            opt.zero_grad(set_to_none=True)
            step += 1
            loss_sum, n_tok = sum_over_ranks(stats).tolist()
            if dist.get_rank() == 0:
                print(f"step {step:3d}/{total} loss {loss_sum / n_tok:.6f} gnorm {norm:.6f} "
                      f"lr {sched.get_last_lr()[0]:.2e} tokens {int(n_tok)}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
