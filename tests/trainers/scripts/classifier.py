"""Small image classifier on class-imbalanced data.  torchrun --nproc-per-node 2 classifier.py"""
import os
import shutil
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

NUM_CLASSES, GLOBAL_BATCH, EPOCHS, LR, STOP_AFTER = 5, 32, 4, 1e-2, 3


def make_dataset(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.multinomial(torch.tensor([0.45, 0.25, 0.15, 0.10, 0.05]), n, replacement=True, generator=g)
    proto = torch.randn(NUM_CLASSES, 3, 16, 16, generator=torch.Generator().manual_seed(7))
    return TensorDataset(0.5 * proto[y] + 1.5 * torch.randn(n, 3, 16, 16, generator=g), y)


def build_model():
    # GroupNorm rather than SyncBatchNorm: no statistics across the batch
    def block(cin, cout):
        return [nn.Conv2d(cin, cout, 3, padding=1, bias=False), nn.GroupNorm(4, cout), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*block(3, 16), *block(16, 32), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
                         nn.Linear(128, NUM_CLASSES))


def weighted_ce(logits, y, class_w):
    """Weighted CE over the global batch; DDP averages the gradients, hence the factor world."""
    weight_sum = class_w[y].sum()
    dist.all_reduce(weight_sum)
    loss = F.cross_entropy(logits, y, weight=class_w, reduction="sum")
    return loss * dist.get_world_size() / weight_sum


@torch.no_grad()
def validate(net, loader, class_w):
    net.eval()
    totals = torch.zeros(2)
    for x, y in loader:
        totals[0] += F.cross_entropy(net(x), y, weight=class_w, reduction="sum")
        totals[1] += class_w[y].sum()
    dist.all_reduce(totals)
    net.train()
    return (totals[0] / totals[1]).item()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    train_set, val_set = make_dataset(192, seed=1), make_dataset(75, seed=2)
    sampler = DistributedSampler(train_set, shuffle=True, seed=0, drop_last=True)
    train_loader = DataLoader(train_set, GLOBAL_BATCH // world, sampler=sampler, drop_last=True)
    # plain strided shards: DistributedSampler would count padded samples twice
    val_loader = DataLoader(Subset(val_set, range(rank, len(val_set), world)), 16)
    counts = torch.bincount(train_set.tensors[1], minlength=NUM_CLASSES)
    class_w = len(train_set) / (NUM_CLASSES * counts.clamp(min=1))

    model = DDP(build_model())
    opt = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01)
    sched = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, factor=0.5, patience=0, threshold=0.01)
    ckpt_dir = [tempfile.mkdtemp(prefix="clf_") if rank == 0 else None]
    dist.broadcast_object_list(ckpt_dir, src=0)
    ckpt_path = os.path.join(ckpt_dir[0], "last.pt")

    step, best, bad, stop = 0, float("inf"), 0, torch.tensor(0)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for x, y in train_loader:
            opt.zero_grad(set_to_none=True)
            weighted_ce(model(x), y, class_w).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            step += 1
            if step % 2 == 0:
                val_loss = validate(model.module, val_loader, class_w)
                sched.step(val_loss)
                best, bad = (val_loss, 0) if val_loss < best else (best, bad + 1)
                stop.fill_(bad >= STOP_AFTER)
                dist.broadcast(stop, src=0)  # every rank leaves the loop at the same step
                if rank == 0:
                    print(f"step {step} val_loss {val_loss:.4f} lr {sched.get_last_lr()[0]:.2e}", flush=True)
            if stop:
                break
        if stop:
            break
        if epoch == 1:  # save on rank 0, resume everywhere
            if rank == 0:
                torch.save({"model": model.module.state_dict(), "opt": opt.state_dict(),
                            "sched": sched.state_dict(), "early": (best, bad)}, ckpt_path)
            dist.barrier()
            state = torch.load(ckpt_path, map_location="cpu")
            model.module.load_state_dict(state["model"])
            opt.load_state_dict(state["opt"])
            sched.load_state_dict(state["sched"])
            best, bad = state["early"]
    dist.barrier()
    if rank == 0:
        print(f"done after {step} steps, best val_loss {best:.4f}", flush=True)
        shutil.rmtree(ckpt_dir[0])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
