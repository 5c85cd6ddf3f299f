"""Asynchronous reduction from hooks, overlapping with the backward; micro-batches inside."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ddp_equivalence import Case

EXAMPLES, FEATURES, CLASSES = 24, 6, 4


@dataclass(frozen=True)
class TrainingArguments:
    micro_batches: int = 3
    label_smoothing: float = 0.1


ARGS = TrainingArguments()


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(FEATURES, 9)
        self.block = nn.Linear(9, 9)
        self.norm = nn.LayerNorm(9)
        self.head = nn.Linear(9, CLASSES)

    def forward(self, x):
        x = torch.relu(self.stem(x))
        return self.head(self.norm(x + torch.tanh(self.block(x))))


def loss(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["y"], label_smoothing=ARGS.label_smoothing)


def make_batch(generator):
    return {
        "x": torch.randn(EXAMPLES, FEATURES, generator=generator),
        "y": torch.randint(CLASSES, (EXAMPLES,), generator=generator),
    }


case = Case(model=Mixer, batch=make_batch, loss=loss, layout="1x2")


class OverlappedReducer:
    """Starts the all-reduce of a gradient as soon as autograd has accumulated it."""

    def __init__(self, module, world_size):
        self.world_size = world_size
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        self.pending = []
        self.last_micro_batch = False
        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(self.launch)

    def launch(self, parameter):
        work = dist.all_reduce(parameter.grad, async_op=True)
        self.pending.append(work)

    def wait(self):
        for work in self.pending:
            work.wait()
        self.pending.clear()

    def finalize(self):
        for parameter in self.parameters:
            parameter.grad.div_(self.world_size)


class Trainer:
    def __init__(self, model, args, world_size):
        self.model, self.args = model, args
        self.reducer = OverlappedReducer(model, world_size)

    def micro_batches(self, batch):
        chunks = {key: value.chunk(self.args.micro_batches) for key, value in batch.items()}
        for index in range(self.args.micro_batches):
            yield {key: parts[index] for key, parts in chunks.items()}

    def train_step(self, batch):
        for index, micro_batch in enumerate(self.micro_batches(batch), start=1):
            self.reducer.last_micro_batch = index == self.args.micro_batches
            (loss(self.model, micro_batch) / self.args.micro_batches).backward()
            self.reducer.wait()
        self.reducer.finalize()


def step(model, shard, rank):
    Trainer(model, ARGS, rank.world_size).train_step(shard)
