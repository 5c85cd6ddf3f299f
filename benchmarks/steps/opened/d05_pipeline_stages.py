"""Two pipeline stages, two replicas of the pipeline; all forwards, then all backwards (GPipe)."""
import torch
import torch.distributed as dist
from torch import nn

from ddp_equivalence import Case

STAGES, MICRO, EXAMPLES, WIDTH = 2, 4, 16, 7


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stages = nn.ModuleList([
            nn.Sequential(nn.Linear(5, WIDTH), nn.Tanh()),
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 2)),
        ])

    def forward(self, x):
        for stage in self.stages:
            x = stage(x)
        return x


def loss(model, batch):
    return nn.functional.mse_loss(model(batch["inputs"]), batch["targets"])


def make_batch(generator):
    return {
        "inputs": torch.randn(EXAMPLES, 5, generator=generator),
        "targets": torch.randn(EXAMPLES, 2, generator=generator),
    }


class Pipeline:
    def __init__(self, model, rank, world):
        self.stage = rank % STAGES
        self.replica = rank // STAGES
        self.replicas = world // STAGES
        self.peer = rank + 1 if self.stage == 0 else rank - 1
        self.module = model.stages[self.stage]
        self.inbox = None

    def receive(self, rows, dtype):
        if self.inbox is None:
            self.inbox = torch.empty(rows, WIDTH, dtype=dtype)
        dist.irecv(self.inbox, self.peer).wait()
        return self.inbox

    def send(self, tensor):
        dist.isend(tensor.detach().contiguous(), self.peer).wait()

    def run(self, batch):
        inputs = batch["inputs"].chunk(self.replicas)[self.replica].chunk(MICRO)
        targets = batch["targets"].chunk(self.replicas)[self.replica].chunk(MICRO)
        if self.stage == 0:
            self.run_first(inputs)
        else:
            self.run_last(inputs, targets)

    def run_first(self, inputs):
        outputs = []
        for micro in inputs:
            outputs.append(self.module(micro))
            self.send(outputs[-1])
        for output in outputs:
            output.backward(self.receive(len(output), output.dtype))

    def run_last(self, inputs, targets):
        pending = []
        for micro, target in zip(inputs, targets):
            activation = self.receive(len(micro), micro.dtype).detach().requires_grad_()
            error = nn.functional.mse_loss(self.module(activation), target) / MICRO
            pending.append((activation, error))
        for activation, error in pending:
            error.backward()
            self.send(activation.grad)


def synchronize(model, replicas):
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad)
        parameter.grad.div_(replicas)


def step(model, shard, rank):
    pipeline = Pipeline(model, dist.get_rank(), dist.get_world_size())
    pipeline.run(shard)
    synchronize(model, pipeline.replicas)


case = Case(model=Net, batch=make_batch, loss=loss, layout="2x2", shards="own")
