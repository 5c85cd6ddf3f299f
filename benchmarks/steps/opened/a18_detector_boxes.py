"""A toy detector in the style of DETR: six queries, matching fixed by the data, auxiliary losses."""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ddp_equivalence import Case

IMAGES, QUERIES, KINDS, DEPTH, WIDTH = 8, 6, 4, 3, 12
NO_OBJECT = KINDS


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Conv2d(3, WIDTH, 4, stride=4)
        self.queries = nn.Parameter(torch.randn(QUERIES, WIDTH) * 0.5)
        self.layers = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(DEPTH))
        self.kinds = nn.Linear(WIDTH, KINDS + 1)
        self.boxes = nn.Linear(WIDTH, 4)

    def forward(self, images):
        memory = self.backbone(images).flatten(2).transpose(1, 2)
        h = self.queries.expand(len(images), -1, -1)
        outputs = []
        for layer in self.layers:
            seen = torch.softmax(h @ memory.transpose(1, 2), -1) @ memory
            h = h + torch.tanh(layer(torch.cat([h, seen], -1)))
            outputs.append((self.kinds(h), self.boxes(h).sigmoid()))
        return outputs


def images(g):
    kinds = torch.randint(0, KINDS, (IMAGES, QUERIES), generator=g)
    objects = torch.tensor([1, 5, 2, 6, 1, 0, 3, 4])
    kinds[torch.arange(QUERIES) >= objects[:, None]] = NO_OBJECT
    return {
        "image": torch.randn(IMAGES, 3, 8, 8, generator=g),
        "kinds": kinds,
        "boxes": torch.rand(IMAGES, QUERIES, 4, generator=g),
    }


class SetCriterion:
    """`final` and `aux` weigh the last decoder layer and the ones before it."""

    def __init__(self, final=1.0, aux=0.5, box=5.0, world=1):
        self.final, self.aux, self.box, self.world = final, aux, box, world

    def num_boxes(self, batch):
        n = (batch["kinds"] != NO_OBJECT).sum()
        if self.world > 1:
            dist.all_reduce(n)
        return n.clamp(min=1)

    def of_layer(self, output, batch, num_boxes):
        kinds, boxes = output
        found = batch["kinds"] != NO_OBJECT
        l1 = (F.l1_loss(boxes, batch["boxes"], reduction="none").sum(-1) * found).sum()
        return F.cross_entropy(kinds.transpose(1, 2), batch["kinds"]) + self.box * l1 / num_boxes

    def __call__(self, outputs, batch):
        n = self.num_boxes(batch)
        total = self.final * self.of_layer(outputs[-1], batch, n)
        for output in outputs[:-1]:
            total = total + self.aux * self.of_layer(output, batch, n)
        return total


def loss(model, batch):
    return SetCriterion()(model(batch["image"]), batch)


def average_as_they_come(model, world):
    """Averages each gradient as soon as the backward has it."""

    def hook(p):
        dist.all_reduce(p.grad)
        p.grad.div_(world)

    for p in model.parameters():
        if p.dim() > 1:
            p.register_post_accumulate_grad_hook(hook)


def step(model, shard, rank):
    world = dist.get_world_size()
    average_as_they_come(model, world)
    SetCriterion(world=world)(model(shard["image"]), shard).backward()


case = Case(model=Detector, batch=images, loss=loss, layout="1x2")
