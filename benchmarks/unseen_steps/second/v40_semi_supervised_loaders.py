"""Semi-supervised training: a supervised loss, and consistency of two views of unlabelled rows."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, SequentialSampler

from ddp_equivalence import Case

EXAMPLES, FEATURES, CLASSES = 16, 6, 4


@dataclass(frozen=True)
class FixMatchConfig:
    micro_batch: int = 4
    unlabelled_ratio: int = 2  # unlabelled rows for each labelled one
    consistency: float = 0.7


CONFIG = FixMatchConfig()


def build_model():
    return nn.Sequential(nn.Linear(FEATURES, 10), nn.ReLU(), nn.Linear(10, CLASSES))


def supervised_loss(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum")


def consistency_loss(model, batch):
    weak, strong = model(torch.cat([batch["weak"], batch["strong"]])).chunk(2)
    return F.cross_entropy(strong, weak.detach().softmax(dim=-1), reduction="sum")


def split_by_label(batch):
    """The unlabelled rows lie beside the labelled ones that they were drawn with."""
    labelled = {"x": batch["x"], "y": batch["y"]}
    unlabelled = {"weak": batch["weak"].flatten(0, 1), "strong": batch["strong"].flatten(0, 1)}
    return labelled, unlabelled


def loss(model, batch):
    labelled, unlabelled = split_by_label(batch)
    supervised = supervised_loss(model, labelled) / len(labelled["y"])
    consistency = consistency_loss(model, unlabelled) / len(unlabelled["weak"])
    return supervised + CONFIG.consistency * consistency


def make_batch(generator):
    shape = (EXAMPLES, CONFIG.unlabelled_ratio, FEATURES)
    clean = torch.randn(shape, generator=generator)
    return {
        "x": torch.randn(EXAMPLES, FEATURES, generator=generator),
        "y": torch.randint(CLASSES, (EXAMPLES,), generator=generator),
        "weak": clean + 0.1 * torch.randn(shape, generator=generator),
        "strong": clean + 0.5 * torch.randn(shape, generator=generator),
    }


case = Case(model=build_model, batch=make_batch, loss=loss, layout="1x2")


class MicroBatches:
    """The rows of a dict of tensors in order, some at a time."""

    def __init__(self, rows, size):
        self.rows = rows
        self.count = len(next(iter(rows.values())))
        self.sampler = BatchSampler(SequentialSampler(range(self.count)), size, drop_last=False)

    def __iter__(self):
        for indices in self.sampler:
            yield {key: value[indices] for key, value in self.rows.items()}


class FixMatchTrainer:
    def __init__(self, model, config):
        self.ddp = DistributedDataParallel(model)
        self.config = config

    def loaders(self, batch):
        labelled, unlabelled = split_by_label(batch)
        size = self.config.micro_batch
        return MicroBatches(labelled, size), MicroBatches(unlabelled, size)

    def train_step(self, batch):
        labelled, unlabelled = self.loaders(batch)
        objective = 0.0
        for with_labels, without_labels in zip(labelled, unlabelled):
            supervised = supervised_loss(self.ddp, with_labels) / labelled.count
            consistency = consistency_loss(self.ddp, without_labels) / unlabelled.count
            objective = objective + supervised + self.config.consistency * consistency
        objective.backward()


def step(model, shard, rank):
    FixMatchTrainer(model, CONFIG).train_step(shard)
