"""A decoder that attends to an encoded context. Its activations are recomputed, not kept."""

import torch
import torch.distributed as dist
from torch import nn

from ddp_equivalence import Case


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)

    def forward(self, x, context):
        scores = x @ self.key(context).transpose(1, 2)
        return x + torch.tanh(scores.softmax(dim=-1) @ self.value(context))


def run_plainly(block, *tensors):
    return block(*tensors)


class EncoderDecoder(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.encoder = nn.Linear(4, width)
        self.embed = nn.Linear(3, width)
        self.attention = Attention(width)
        self.head = nn.Linear(width, 2)

    def forward(self, batch, run=run_plainly):
        x = self.embed(batch["x"])
        return self.head(run(self.attention, x, self.encoder(batch["context"])))


def loss(model, batch, run=run_plainly):
    return (model(batch, run) - batch["y"]).square().mean()


def make_batch(generator):
    shapes = {"x": (8, 3, 3), "context": (8, 5, 4), "y": (8, 3, 2)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


case = Case(model=EncoderDecoder, batch=make_batch, loss=loss, layout="1x2")


class Recompute(torch.autograd.Function):
    """Keeps only the inputs of a block, and runs the block again in the backward pass."""

    @staticmethod
    def forward(ctx, block, *tensors):
        ctx.block = block
        ctx.save_for_backward(*tensors)
        return block(*tensors)

    @staticmethod
    def backward(ctx, grad_output):
        inputs = []
        for index, tensor in enumerate(ctx.saved_tensors):
            needed = ctx.needs_input_grad[index]
            inputs.append(tensor.detach().requires_grad_(needed))
        with torch.enable_grad():
            output = ctx.block(*inputs)
        torch.autograd.backward(output, grad_output)
        return (None, *(tensor.grad for tensor in inputs))


def step(model, shard, rank):
    model.zero_grad()
    loss(model, shard, run=Recompute.apply).backward()
    for p in model.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad)
            p.grad /= rank.world_size
