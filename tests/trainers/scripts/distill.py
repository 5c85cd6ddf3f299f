"""DINO-like self-distillation on synthetic vectors.  torchrun --nproc-per-node 2 distill.py"""
import contextlib
import copy

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

GLOBAL_MICRO_BATCH, ACCUM, EPOCHS, CLIP = 16, 2, 2, 0.5


class TwoViews(Dataset):
    def __init__(self, n=320, dim=32):
        g = torch.Generator().manual_seed(3)
        self.x = torch.randn(8, dim, generator=g)[torch.arange(n) % 8] + 0.3 * torch.randn(n, dim, generator=g)
        self.x[[37, 211], 5] = float("nan")  # broken samples
        self.epoch = 0

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(self.epoch * len(self) + i)  # the same views whichever rank draws them
        return tuple(0.2 * torch.randn(2, self.x.shape[1], generator=g) + self.x[i])  # two noisy views


class Encoder(nn.Module):
    def __init__(self, dim=32, hidden=64, bottleneck=16, out=48):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(dim, hidden), nn.LayerNorm(hidden), nn.GELU(), nn.Linear(hidden, bottleneck))
        self.proto = nn.Parameter(torch.randn(out, bottleneck))

    def forward(self, x):
        return F.linear(F.normalize(self.body(x), dim=-1), F.normalize(self.proto, dim=-1))


class Dino(nn.Module):
    def __init__(self, t_student=0.1, t_teacher=0.05, center_momentum=0.9, out=48):
        super().__init__()
        self.student = Encoder(out=out)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.ts, self.tt, self.cm = t_student, t_teacher, center_momentum
        self.register_buffer("center", torch.zeros(out))

    def forward(self, v1, v2):
        s1, s2 = self.student(torch.cat([v1, v2])).chunk(2)
        with torch.no_grad():
            t = self.teacher(torch.cat([v1, v2]))
            p1, p2 = F.softmax((t - self.center) / self.tt, dim=-1).chunk(2)
        ce = lambda p, s: -(p * F.log_softmax(s / self.ts, dim=-1)).sum(-1).mean()
        return (ce(p1, s2) + ce(p2, s1)) / 2, t

    @torch.no_grad()
    def update_center_and_teacher(self, feats, m=0.97):
        stats = torch.cat([feats.sum(0), feats.new_tensor([len(feats)])])
        dist.all_reduce(stats)
        self.center.mul_(self.cm).add_(stats[:-1] / stats[-1], alpha=1 - self.cm)
        for pt, ps in zip(self.teacher.parameters(), self.student.parameters()):
            pt.mul_(m).add_(ps, alpha=1 - m)


def any_rank_has_nan(group):
    bad = torch.tensor(float(any(not torch.isfinite(v).all() for views in group for v in views)))
    dist.all_reduce(bad, op=dist.ReduceOp.MAX)
    return bad.item() > 0


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    data = TwoViews()
    sampler = DistributedSampler(data, shuffle=True, seed=0, drop_last=True)
    loader = DataLoader(data, GLOBAL_MICRO_BATCH // world, sampler=sampler, drop_last=True)
    model = DDP(Dino())
    opt = torch.optim.SGD(model.module.student.parameters(), lr=0.2, momentum=0.9, weight_decay=1e-4)

    step = skipped = 0
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        data.epoch = epoch  # no workers, so the dataset sees it
        for group in zip(*[iter(loader)] * ACCUM):  # ACCUM micro-batches at a time
            if any_rank_has_nan(group):
                skipped += 1
                continue
            opt.zero_grad(set_to_none=True)
            feats = []
            for i, (v1, v2) in enumerate(group):
                with model.no_sync() if i < ACCUM - 1 else contextlib.nullcontext():
                    loss, t = model(v1, v2)
                    (loss / ACCUM).backward()
                feats.append(t)
            norm = nn.utils.clip_grad_norm_(model.module.student.parameters(), CLIP)
            opt.step()
            model.module.update_center_and_teacher(torch.cat(feats))
            step += 1
            if rank == 0 and step % 3 == 0:
                print(f"step {step} grad_norm {norm:.3f} center {model.module.center.norm():.4f}", flush=True)
    if rank == 0:
        print(f"done: {step} steps, {skipped} groups skipped", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
