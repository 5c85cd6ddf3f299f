"""Several tasks share an encoder. A rank's examples seldom cover all of them, so heads may stay unused."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ddp_equivalence import Case

TASKS = {"sentiment": 2, "topic": 5, "intent": 7}
VOCABULARY = 25


class MultiTask(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(VOCABULARY, 10, mode="mean")
        self.encoder = nn.Sequential(nn.Linear(10, 14), nn.Tanh())
        self.heads = nn.ModuleDict({name: nn.Linear(14, size) for name, size in TASKS.items()})

    def forward(self, words, task):
        """The logits of each task that occurs, with the rows that they belong to."""
        hidden = self.encoder(self.bag(words))
        for index, name in enumerate(TASKS):
            rows = (task == index).nonzero().squeeze(-1)
            if len(rows):
                yield rows, self.heads[name](hidden[rows])


def sentences(generator):
    # One source after the other, as the files are read.
    task = torch.tensor([0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 2, 2])
    answer = torch.stack([torch.randint(size, (12,), generator=generator) for size in TASKS.values()])
    return {
        "words": torch.randint(VOCABULARY, (12, 7), generator=generator),
        "task": task,
        "answer": answer.gather(0, task[None]).squeeze(0),
    }


def loss(model, batch):
    total = 0.0
    for rows, logits in model(batch["words"], batch["task"]):
        total = total + F.cross_entropy(logits, batch["answer"][rows], reduction="sum")
    return total / len(batch["task"])


def reduce_gradients(model):
    """Average the gradients; a parameter without one on some rank joins in with zeros."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    used = torch.tensor([p.grad is not None for p in parameters], dtype=torch.float64)
    dist.all_reduce(used)
    for p, ranks in zip(parameters, used.tolist()):
        if ranks == 0:
            continue
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        dist.all_reduce(p.grad)
        p.grad /= ranks


def step(model, shard, rank):
    model.zero_grad(set_to_none=True)
    loss(model, shard).backward()
    reduce_gradients(model)


case = Case(model=MultiTask, batch=sentences, loss=loss, layout="1x4")
