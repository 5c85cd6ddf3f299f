"""Two nodes that hold a replica each, and a sampler that follows the device mesh."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from ddp_equivalence import Case

EXAMPLES = 24


class Signals(Dataset):
    def __init__(self, batch):
        self.waves, self.periods = batch["waves"], batch["periods"]

    def __len__(self):
        return len(self.waves)

    def __getitem__(self, index):
        return {"waves": self.waves[index], "periods": self.periods[index]}


class Down(nn.Module):
    def __init__(self, channels_in, channels_out):
        super().__init__()
        self.convolution = nn.Conv1d(channels_in, channels_out, 4, stride=2, padding=1)
        self.norm = nn.GroupNorm(2, channels_out)

    def forward(self, x):
        return nn.functional.leaky_relu(self.norm(self.convolution(x)), 0.1)


class PeriodFinder(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(Down(1, 6), Down(6, 8), Down(8, 10))
        self.head = nn.Linear(10, 1)

    def forward(self, waves):
        return self.head(self.body(waves.unsqueeze(1)).mean(-1)).squeeze(-1)


def make_batch(generator):
    periods = 2 + 6 * torch.rand(EXAMPLES, generator=generator)
    time = torch.arange(16.0)
    noise = 0.2 * torch.randn(EXAMPLES, 16, generator=generator)
    return {"waves": torch.sin(time / periods[:, None]) + noise, "periods": periods.log()}


def loss(model, batch):
    return nn.functional.huber_loss(model(batch["waves"]), batch["periods"])


class HybridRun:
    """Everything that is needed to train on a mesh of (nodes, ranks of a node)."""

    def __init__(self, model, rank):
        self.mesh = init_device_mesh(
            "cpu", (rank.nodes, rank.world_size // rank.nodes), mesh_dim_names=("node", "shard")
        )
        self.model = FSDP(
            model,
            device_mesh=self.mesh,
            sharding_strategy=ShardingStrategy.HYBRID_SHARD,
            auto_wrap_policy=ModuleWrapPolicy([Down]),
            use_orig_params=True,
            device_id=rank.device,
        )

    def loader(self, dataset):
        sampler = DistributedSampler(
            dataset,
            num_replicas=self.mesh.size(),
            rank=self.mesh.get_local_rank("shard"),
            shuffle=False,
        )
        return DataLoader(dataset, batch_size=EXAMPLES // self.mesh.size(), sampler=sampler)

    def run_epoch(self, dataset):
        for batch in self.loader(dataset):
            loss(self.model, batch).backward()


def step(model, batch, rank):
    HybridRun(model, rank).run_epoch(Signals(batch))


case = Case(model=PeriodFinder, batch=make_batch, loss=loss, layout="2x2", shards="own")
