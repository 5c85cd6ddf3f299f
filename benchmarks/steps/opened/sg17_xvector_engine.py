"""Speaker recognition with an engine of its own: static loss scale, sharded weights, clipping by global norm."""
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

from ddp_equivalence import Case

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 0.1,
    "fp16": {"enabled": True, "loss_scale_power": 8},
    "zero_optimization": {"stage": 3},
}

COEFFICIENTS, SPEAKERS = 6, 10


class StatsPooling(nn.Module):
    def forward(self, x):
        return torch.cat([x.mean(2), (x.var(2, unbiased=False) + 1e-4).sqrt()], 1)


class XVector(nn.Module):
    def __init__(self, width=10):
        super().__init__()
        self.frames = nn.Sequential(
            nn.Conv1d(COEFFICIENTS, width, 3), nn.LeakyReLU(), nn.Conv1d(width, width, 3, dilation=2), nn.LeakyReLU()
        )
        self.pool = StatsPooling()
        self.segment = nn.Sequential(nn.Linear(2 * width, width), nn.LeakyReLU(), nn.LayerNorm(width))
        self.speakers = nn.Linear(width, SPEAKERS)

    def forward(self, mfcc):
        return self.speakers(self.segment(self.pool(self.frames(mfcc))))


def recordings(generator):
    mfcc = torch.randn(8, COEFFICIENTS, 14, generator=generator)
    return {"mfcc": mfcc, "speaker": torch.randint(0, SPEAKERS, (8,), generator=generator)}


def speaker_loss(model, batch):
    return F.cross_entropy(model(batch["mfcc"]), batch["speaker"], label_smoothing=0.05)


def clipped(model, batch):
    """Speaker loss whose gradient is limited to the configured norm."""
    value = speaker_loss(model, batch)
    grads = torch.autograd.grad(value, tuple(model.parameters()), retain_graph=True)
    norm = torch.stack([g.norm() for g in grads]).norm()
    return value * (CONFIG["gradient_clipping"] / norm).clamp(max=1.0).detach()


class LossScaler:
    def __init__(self, power):
        self.scale = 2.0**power

    def __call__(self, value):
        return value * self.scale

    @torch.no_grad()
    def unscale_(self, params):
        for p in params:
            p.grad.mul_(1 / self.scale)


class Engine:
    def __init__(self, model, config):
        self.config = config
        for block in (model.frames, model.segment):
            fully_shard(block)
        self.module = fully_shard(model)
        fp16 = config["fp16"]
        self.scaler = LossScaler(fp16["loss_scale_power"] if fp16["enabled"] else 0)

    def params(self):
        return [p for p in self.module.parameters() if p.grad is not None]

    def backward(self, value):
        self.scaler(value).backward()

    def clip_gradients(self):
        limit = self.config["gradient_clipping"]
        grads = [p.grad for p in self.params()]
        self.grad_norm = nn.utils.get_total_norm(grads).full_tensor().item()
        if self.grad_norm > limit:
            for grad in grads:
                grad.mul_(limit / self.grad_norm)

    def prepare_step(self):
        self.clip_gradients()
        self.scaler.unscale_(self.params())


def step(model, shard, rank):
    engine = Engine(model, CONFIG)
    engine.backward(speaker_loss(engine.module, shard))
    engine.prepare_step()
    return {name: p.grad for name, p in model.named_parameters()}


case = Case(model=XVector, batch=recordings, loss=clipped, layout="1x2")
