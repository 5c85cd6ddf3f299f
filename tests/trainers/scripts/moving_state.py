"""Small StyleGAN2-like trainer with lazy R1, path length regularisation and an EMA generator."""
import argparse
import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import autograd, nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Generator(nn.Module):
    def __init__(self, w_dim=24, ch=12):
        super().__init__()
        self.mapping = nn.Sequential(nn.Linear(16, w_dim), nn.LeakyReLU(0.2), nn.Linear(w_dim, w_dim))
        self.const = nn.Parameter(torch.randn(1, ch, 4, 4))
        self.style1, self.style2 = nn.Linear(w_dim, ch), nn.Linear(w_dim, ch)
        self.conv, self.to_img = nn.Conv2d(ch, ch, 3, padding=1), nn.Conv2d(ch, 1, 1)

    def forward(self, z):
        w = self.mapping(z)
        x = self.const * (1 + self.style1(w))[:, :, None, None]
        x = F.interpolate(F.leaky_relu(self.conv(x), 0.2), scale_factor=2)
        return self.to_img(x * (1 + self.style2(w))[:, :, None, None]), w


def reduce_mean(t):
    dist.all_reduce(t := t.detach().clone())
    return t / dist.get_world_size()


def update(opt, loss):
    opt.zero_grad()
    loss.backward()
    opt.step()


class Trainer:
    def __init__(self, args):
        self.args = args
        d = nn.Sequential(nn.Conv2d(1, 12, 3, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(12, 12, 3, 2, 1),
                          nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(48, 1))
        self.g, self.d = DDP(Generator(), broadcast_buffers=False), DDP(d, broadcast_buffers=False)
        self.g_ema = copy.deepcopy(self.g.module).eval()
        self.g_opt = optim.Adam(self.g.parameters(), lr=args.lr, betas=(0.0, 0.99))
        self.d_opt = optim.Adam(self.d.parameters(), lr=args.lr, betas=(0.0, 0.99))
        self.mean_path_length = 0.0
        self.ema_decay = 0.5 ** (args.batch * dist.get_world_size() / 100)

    def d_step(self, real, i):
        self.g.requires_grad_(False)
        self.d.requires_grad_(True)
        fake, _ = self.g(torch.randn(self.args.batch, 16))
        loss = F.softplus(self.d(fake)).mean() + F.softplus(-self.d(real)).mean()
        update(self.d_opt, loss)
        if i % self.args.d_reg_every == 0:
            pred = self.d(real.requires_grad_(True))
            grad, = autograd.grad(pred.sum(), real, create_graph=True)
            r1 = grad.pow(2).sum((1, 2, 3)).mean()
            update(self.d_opt, self.args.r1 / 2 * r1 * self.args.d_reg_every + 0 * pred.sum())
        return loss

    def g_step(self, i):
        self.g.requires_grad_(True)
        self.d.requires_grad_(False)
        loss = F.softplus(-self.d(self.g(torch.randn(self.args.batch, 16))[0])).mean()
        update(self.g_opt, loss)
        if i % self.args.g_reg_every == 0:
            fake, w = self.g(torch.randn(self.args.batch // 2, 16))
            noise = torch.randn_like(fake) / (fake.shape[2] * fake.shape[3]) ** 0.5
            grad, = autograd.grad((fake * noise).sum(), w, create_graph=True)
            lengths = grad.pow(2).sum(1).sqrt()
            batch_mean = reduce_mean(lengths.mean())
            self.mean_path_length += self.args.path_decay * (batch_mean.item() - self.mean_path_length)
            penalty = (lengths - self.mean_path_length).pow(2).mean()
            update(self.g_opt, self.args.path_weight * self.args.g_reg_every * penalty + 0 * fake.sum())
        with torch.no_grad():
            for p_ema, p in zip(self.g_ema.parameters(), self.g.module.parameters()):
                p_ema.lerp_(p, 1 - self.ema_decay)
        return loss


def main():
    ap = argparse.ArgumentParser()
    for name, default in dict(epochs=2, batch=8, d_reg_every=4, g_reg_every=2, seed=0, lr=2e-3, r1=1.0,
                              path_weight=2.0, path_decay=0.1, out="").items():
        ap.add_argument("--" + name, type=type(default), default=default)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(args.seed * dist.get_world_size() + dist.get_rank())
    images = torch.randn(96, 1, 8, 8, generator=torch.Generator().manual_seed(7)).cumsum(-1) * 0.3
    sampler = DistributedSampler(TensorDataset(images), shuffle=True, drop_last=True)
    loader = DataLoader(sampler.dataset, batch_size=args.batch, sampler=sampler, drop_last=True)
    trainer, i = Trainer(args), 0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for real, in loader:
            d_loss, g_loss = trainer.d_step(real, i), trainer.g_step(i)
            log = reduce_mean(torch.stack([d_loss, g_loss, torch.tensor(trainer.mean_path_length)])).tolist()
            if dist.get_rank() == 0:
                print("%3d  d %.4f  g %.4f  path %.5f" % (i, *log), flush=True)
            i += 1
    if dist.get_rank() == 0 and args.out:
        torch.save({k: v.state_dict() for k, v in vars(trainer).items() if hasattr(v, "state_dict")}, args.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
