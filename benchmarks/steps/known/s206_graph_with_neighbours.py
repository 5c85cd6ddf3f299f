"""Papers are classified by what they cite. Every rank owns some of the nodes of the graph, and
loads their neighbours, too, whose features it needs.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank


@dataclass
class Graph:
    """``links[i, j]`` is the weight of node j in the mean over the neighbours of node i."""

    features: Tensor
    links: Tensor
    topic: Tensor
    labelled: Tensor


@dataclass
class Part(Graph):
    """A part of a graph. ``owned`` is false for nodes that only feed those of this rank."""

    owned: Tensor


class Convolution(nn.Module):
    def __init__(self, width: int = 8, topics: int = 4) -> None:
        super().__init__()
        self.encode = nn.Linear(6, width)
        self.own = nn.Linear(width, topics)
        self.neighbours = nn.Linear(width, topics, bias=False)

    def forward(self, features: Tensor, links: Tensor) -> Tensor:
        encoded = torch.tanh(self.encode(features))
        return self.own(encoded) + self.neighbours(links @ encoded)


def loss(model: nn.Module, graph: Graph) -> Tensor:
    logits = model(graph.features, graph.links)
    return F.cross_entropy(logits[graph.labelled], graph.topic[graph.labelled])


def make_batch(generator: torch.Generator) -> Graph:
    cites = (torch.rand(20, 20, generator=generator) < 0.12).double()
    return Graph(
        features=torch.randn(20, 6, generator=generator),
        links=cites / cites.sum(1, keepdim=True).clamp(min=1),
        topic=torch.randint(4, (20,), generator=generator),
        labelled=torch.rand(20, generator=generator) < 0.7,
    )


case = Case(model=Convolution, batch=make_batch, loss=loss, layout="1x2", shards="own")


def part_of(graph: Graph, rank: Rank) -> Part:
    """The nodes of a rank and their neighbours."""
    owned = torch.arange(len(graph.topic), device=rank.device) % rank.world_size == rank.rank
    nodes = (owned | (graph.links[owned] > 0).any(0)).nonzero()[:, 0]
    return Part(
        features=graph.features[nodes],
        links=graph.links[nodes][:, nodes],
        topic=graph.topic[nodes],
        labelled=graph.labelled[nodes],
        owned=owned[nodes],
    )


class NodeTrainer:
    def __init__(self, model: nn.Module, rank: Rank) -> None:
        self.ddp = DistributedDataParallel(model)
        self.world_size = rank.world_size

    def train_on(self, part: Part, labels: Tensor) -> float:
        """Returns the accuracy on the nodes of this rank."""
        logits = self.ddp(part.features, part.links)
        judged = part.labelled
        summed = F.cross_entropy(logits[judged], part.topic[judged], reduction="sum")
        (self.world_size * summed / labels).backward()
        return (logits.argmax(-1) == part.topic)[part.owned].double().mean().item()


def step(model: nn.Module, graph: Graph, rank: Rank) -> None:
    NodeTrainer(model, rank).train_on(part_of(graph, rank), labels=graph.labelled.sum())
