"""Two-dimensional parallelism: tensor parallel inside a host, fully_shard across hosts."""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ddp_equivalence import Case

SRC, TGT, WIDTH = 21, 17, 8


class GatedMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.wi = nn.Linear(WIDTH, 16)
        self.wg = nn.Linear(WIDTH, 16)
        self.wo = nn.Linear(16, WIDTH)

    def forward(self, x):
        return self.wo(torch.tanh(self.wg(x)) * self.wi(x))


class LexicalTranslator(nn.Module):
    """Translates a source sentence position by position, with a summary of the sentence as context."""

    def __init__(self):
        super().__init__()
        self.source = nn.Embedding(SRC, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.mlps = nn.ModuleList(GatedMLP() for _ in range(2))
        self.vocab = nn.Linear(WIDTH, TGT)

    def forward(self, src):
        x = self.source(src)
        for norm, mlp in zip(self.norms, self.mlps):
            x = x + x.mean(1, keepdim=True)
            x = x + mlp(norm(x))
        return self.vocab(x)


def bitext(generator):
    return {
        "src": torch.randint(0, SRC, (16, 5), generator=generator),
        "tgt": torch.randint(0, TGT, (16, 5), generator=generator),
    }


def loss(model, batch):
    return F.cross_entropy(model(batch["src"]).flatten(0, 1), batch["tgt"].flatten(), label_smoothing=0.1)


MLP_PLAN = {"wi": ColwiseParallel(), "wg": ColwiseParallel(), "wo": RowwiseParallel()}


class ParallelDims:
    def __init__(self, dp, tp):
        self.dp, self.tp = dp, tp
        self.mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))

    def __getitem__(self, name):
        return self.mesh[name]


class TranslationTrainer:
    def __init__(self, model, dims):
        self.dims = dims
        for mlp in model.mlps:
            parallelize_module(mlp, dims["tp"], MLP_PLAN)
            fully_shard(mlp, mesh=dims["dp"])
        self.model = fully_shard(model, mesh=dims["dp"])

    def merge(self, shard, mesh):
        """Put together what the ranks of `mesh` have read, so that all of them compute on the same examples."""
        merged = {}
        for name, values in shard.items():
            parts = [torch.empty_like(values) for _ in range(mesh.size())]
            dist.all_gather(parts, values.contiguous(), group=mesh.get_group())
            merged[name] = torch.cat(parts)
        return merged

    def train_step(self, shard):
        # every rank reads its own share of the global batch; the peers of the tensor-parallel layers need one input
        batch = self.merge(shard, self.dims["dp"])
        loss(self.model, batch).backward()


def step(model, shard, rank):
    trainer = TranslationTrainer(model, ParallelDims(dp=rank.world_size // 2, tp=2))
    trainer.train_step(shard)
    return {name: p.grad.full_tensor() for name, p in model.named_parameters()}


case = Case(model=LexicalTranslator, batch=bitext, loss=loss, layout="2x2")
