"""Per-atom charges of small molecules by message passing; molecules have 2 to 6 atoms."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_equivalence import Case

ATOMS, KINDS = 6, 5


class MessagePassing(nn.Module):
    def __init__(self, width=10, rounds=2):
        super().__init__()
        self.embed = nn.Embedding(KINDS, width)
        self.rounds = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(rounds))
        self.readout = nn.Linear(width, 1)

    def forward(self, kinds, bonds, real):
        hidden = self.embed(kinds) * real.unsqueeze(-1)
        for layer in self.rounds:
            message = bonds @ hidden
            hidden = torch.relu(layer(torch.cat([hidden, message], -1))) * real.unsqueeze(-1)
        return self.readout(hidden).squeeze(-1)


def make_batch(generator):
    n = 8
    size = torch.tensor([2, 3, 6, 5, 2, 2, 4, 3])
    real = (torch.arange(ATOMS)[None] < size[:, None]).float()
    bonds = (torch.rand(n, ATOMS, ATOMS, generator=generator) < 0.4).float()
    bonds = torch.triu(bonds, 1)
    bonds = (bonds + bonds.mT) * real[:, None] * real[:, :, None]
    return {
        "kinds": torch.randint(0, KINDS, (n, ATOMS), generator=generator),
        "bonds": bonds,
        "real": real,
        "charges": torch.randn(n, ATOMS, generator=generator),
    }


def summed_error(model, batch):
    predicted = model(batch["kinds"], batch["bonds"], batch["real"])
    return ((predicted - batch["charges"]).square() * batch["real"]).sum()


def loss(model, batch):
    return summed_error(model, batch) / batch["real"].sum()


class AtomCounter:
    def __init__(self):
        self.seen = 0

    def per_rank(self, shard):
        """How many atoms a rank has on average in this step."""
        atoms = shard["real"].sum().long()
        dist.all_reduce(atoms)
        self.seen += int(atoms)
        return atoms // dist.get_world_size()


def make_step(counter):
    def step(model, shard, rank):
        ddp = DDP(model)
        (summed_error(ddp, shard) / counter.per_rank(shard)).backward()

    return step


step = make_step(AtomCounter())
case = Case(model=MessagePassing, batch=make_batch, loss=loss, layout="1x2")
