"""Sound-event detection with an MLP-mixer; replicas exchange gradients once per update, shards after each micro-batch."""
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from ddp_equivalence import Case

PATCHES, CHANNELS, EVENTS = 6, 10, 5


class MixerLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(CHANNELS), nn.LayerNorm(CHANNELS)
        self.tokens = nn.Sequential(nn.Linear(PATCHES, 9), nn.GELU(), nn.Linear(9, PATCHES))
        self.channels = nn.Sequential(nn.Linear(CHANNELS, 15), nn.GELU(), nn.Linear(15, CHANNELS))

    def forward(self, x):
        x = x + self.tokens(self.n1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.n2(x))


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch = nn.Conv1d(4, CHANNELS, 3, stride=3)
        self.layers = nn.ModuleList([MixerLayer(), MixerLayer()])
        self.head = nn.Linear(CHANNELS, EVENTS)

    def forward(self, spectrogram):
        x = self.patch(spectrogram).transpose(1, 2)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


def clips(generator):
    return {
        "spectrogram": torch.randn(16, 4, 3 * PATCHES, generator=generator),
        "events": torch.randint(0, 2, (16, EVENTS), generator=generator),
    }


def event_loss(model, batch, reduction="mean"):
    logits = model(batch["spectrogram"])
    return F.binary_cross_entropy_with_logits(logits, batch["events"].to(logits), reduction=reduction)


@dataclass
class UpdatePlan:
    micro_batches: tuple = (1, 3)  # a short one first, to have the kernels warm
    loss_gain: float = 64.0


class DetectionTrainer:
    def __init__(self, model, world_size, plan):
        self.plan = plan
        self.mesh = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("replicate", "shard"))
        policy = MixedPrecisionPolicy(output_dtype=next(model.parameters()).dtype)
        for layer in model.layers:
            fully_shard(layer, mesh=self.mesh, mp_policy=policy, reshard_after_forward=False)
        self.model = fully_shard(model, mesh=self.mesh, mp_policy=policy)
        # gains and means are all dealt with in `update`
        for module in (*model.layers, model):
            module.set_gradient_divide_factor(1.0)

    def update(self, batch):
        pieces = [dict(zip(batch, piece)) for piece in zip(*(v.split(self.plan.micro_batches) for v in batch.values()))]
        for number, piece in enumerate(pieces):
            last = number + 1 == len(pieces)
            self.model.set_is_last_backward(last)
            self.model.set_requires_all_reduce(last)
            self.model.set_reshard_after_backward(last)
            (self.plan.loss_gain * event_loss(self.model, piece, reduction="sum")).backward()
        everybodys_terms = batch["events"].numel() * self.mesh.size()
        for p in self.model.parameters():
            p.grad.div_(everybodys_terms).div_(self.plan.loss_gain)


def step(model, shard, rank):
    trainer = DetectionTrainer(model, rank.world_size, UpdatePlan())
    trainer.update(shard)
    return {name: p.grad for name, p in model.named_parameters()}


case = Case(model=Mixer, batch=clips, loss=event_loss, layout="2x2")
