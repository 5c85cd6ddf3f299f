"""Distils a teacher's word distribution into a student; gradients leave while backward runs."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ddp_equivalence import Case

VOCAB, STEPS, T = 18, 7, 2.0


def student():
    return nn.Sequential(
        nn.Embedding(VOCAB, 10),
        nn.Conv1d(STEPS, STEPS, 3, padding=1),
        nn.ELU(),
        nn.Linear(10, VOCAB),
    )


def teacher_outputs(generator):
    ids = torch.randint(0, VOCAB, (16, STEPS), generator=generator)
    return {
        "ids": ids,
        "teacher": torch.randn(16, STEPS, VOCAB, generator=generator) * 2,
        "weight": torch.rand(16, generator=generator) + 0.2,
    }


def divergence(model, batch):
    """KL from the student to the teacher, weighted by the sentence, not yet normalised."""
    log_q = F.log_softmax(model(batch["ids"]) / T, -1)
    log_p = F.log_softmax(batch["teacher"] / T, -1)
    kl = F.kl_div(log_q, log_p, log_target=True, reduction="none").sum((1, 2))
    return T * T * (kl * batch["weight"]).sum()


def loss(model, batch):
    return divergence(model, batch) / batch["weight"].sum()


class Overlapped:
    """Starts an all_reduce for a gradient as soon as it is complete."""

    def __init__(self, parameters):
        self.pending = []
        self.armed = False
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self.launch)

    def launch(self, parameter):
        if self.armed:
            self.pending.append(dist.all_reduce(parameter.grad, async_op=True))

    def finish(self):
        for work in self.pending:
            work.wait()
        self.pending.clear()


def micro_batches(shard, parts):
    for rows in zip(*(tensor.chunk(parts) for tensor in shard.values())):
        yield dict(zip(shard, rows))


def step(model, shard, rank):
    overlapped = Overlapped(model.parameters())
    weight = shard["weight"].sum()
    dist.all_reduce(weight)
    parts = 4
    for number, rows in enumerate(micro_batches(shard, parts), start=1):
        overlapped.armed = number >= parts - 1
        (divergence(model, rows) / weight).backward()
        overlapped.finish()


case = Case(model=student, batch=teacher_outputs, loss=loss)
