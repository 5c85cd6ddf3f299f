"""Action recognition per frame; the clip is cut in time over the two GPUs of a node.

Each GPU holds half of the frames of the node's clips. The temporal convolution is causal and needs
the last frames of the GPU before it, which travel through ``PreviousFrames``.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

FRAMES, PIXELS, HIDDEN, ACTIONS = 8, 10, 6, 4
HALO = 2
PER_NODE = 2


class PreviousFrames(torch.autograd.Function):
    """The last HALO frames of the rank before this one (zeros for the first)."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group, ctx.shape = group, x.shape
        mine = x[:, -HALO:].contiguous()
        everyones = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        dist.all_gather(everyones, mine, group=group)
        me = dist.get_rank(group)
        return everyones[me - 1] if me > 0 else torch.zeros_like(mine)

    @staticmethod
    def backward(ctx, grad):
        me, size = dist.get_rank(ctx.group), dist.get_world_size(ctx.group)
        grads = [torch.empty_like(grad) for _ in range(size)]
        dist.all_gather(grads, grad.contiguous(), group=ctx.group)
        dx = grad.new_zeros(ctx.shape)
        if me + 1 < size:
            dx[:, :HALO] += grads[me + 1]
        return dx, None


class ActionNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.frame = nn.Linear(PIXELS, HIDDEN)
        self.temporal = nn.Conv1d(HIDDEN, HIDDEN, kernel_size=HALO + 1)
        self.head = nn.Linear(HIDDEN, ACTIONS)

    def forward(self, clips, group=None):
        h = torch.tanh(self.frame(clips))
        if group is None:
            before = h.new_zeros(h.shape[0], HALO, HIDDEN)
        else:
            before = PreviousFrames.apply(h, group)
        h = torch.cat([before, h], dim=1).transpose(1, 2)
        return self.head(self.temporal(h).transpose(1, 2).relu())


def frame_loss(logits, actions):
    return F.cross_entropy(logits.flatten(0, 1), actions.flatten())


def clips(generator):
    return {
        "clip": torch.randn(8, FRAMES, PIXELS, generator=generator),
        "action": torch.randint(ACTIONS, (8, FRAMES), generator=generator),
    }


case = Case(
    model=ActionNet,
    batch=clips,
    loss=lambda model, batch: frame_loss(model(batch["clip"]), batch["action"]),
    layout="2x2",
)


def of_node(x, group):
    parts = [torch.empty_like(x) for _ in range(PER_NODE)]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts)


def step(model, shard, rank):
    group, _ = dist.new_subgroups(PER_NODE)
    place = dist.get_rank(group)
    clip, action = (
        of_node(shard[name], group).chunk(PER_NODE, dim=1)[place] for name in ("clip", "action")
    )
    ddp = DistributedDataParallel(model)
    frame_loss(ddp(clip, group=group), action).backward()
