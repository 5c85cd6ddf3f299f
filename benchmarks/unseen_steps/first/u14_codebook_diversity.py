"""wav2vec 2.0 style pretraining: contrastive loss inside each utterance plus the codebook diversity loss,
whose code distribution is averaged over the utterances of all ranks. Gradients are averaged by DDP."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from ddp_equivalence import Case

FEATS, FRAMES, CODES, DIM = 5, 8, 10, 8
DIVERSITY_WEIGHT = 0.5
KAPPA = 0.3


class SoftQuantizer(nn.Module):
    def __init__(self):
        super().__init__()
        self.logits = nn.Linear(12, CODES)
        self.codebook = nn.Parameter(torch.randn(CODES, DIM))

    def forward(self, z):
        probs = self.logits(z).softmax(dim=-1)
        return probs @ self.codebook, probs


class SpeechPretrainer(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(FEATS, 12), nn.GELU())
        self.mask_embedding = nn.Parameter(torch.randn(12))
        self.context = nn.GRU(12, 12, batch_first=True)
        self.project = nn.Linear(12, DIM)
        self.quantizer = SoftQuantizer()

    def forward(self, feats, masked):
        z = self.encoder(feats)
        target, probs = self.quantizer(z)
        corrupted = torch.where(masked.unsqueeze(-1), self.mask_embedding, z)
        context, _ = self.context(corrupted)
        return self.project(context), target, probs


def build_model():
    return SpeechPretrainer()


def contrastive(context, target):
    """Each frame has to pick its own target among those of the utterance."""
    sim = F.normalize(context, dim=-1) @ F.normalize(target, dim=-1).transpose(1, 2) / KAPPA
    labels = torch.arange(sim.size(1)).expand(sim.size(0), -1)
    return F.cross_entropy(sim.transpose(1, 2), labels)


def diversity(avg_probs):
    perplexity = torch.exp(-(avg_probs * torch.log(avg_probs + 1e-9)).sum())
    return (CODES - perplexity) / CODES


def loss(model, batch):
    context, target, probs = model(batch["feats"], batch["masked"])
    return contrastive(context, target) + DIVERSITY_WEIGHT * diversity(probs.mean(dim=(0, 1)))


def make_batch(generator):
    rows = 12
    shift = torch.linspace(-2.0, 2.0, rows).view(rows, 1, 1)
    return {
        "feats": 2.0 * torch.randn(rows, FRAMES, FEATS, generator=generator) + shift,
        "masked": torch.rand(rows, FRAMES, generator=generator) < 0.4,
    }


case = Case(model=build_model, batch=make_batch, loss=loss, layout="1x2")


class MeanOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.world_size = dist.get_world_size()
        out = x.clone()
        dist.all_reduce(out)
        return out / ctx.world_size

    @staticmethod
    def backward(ctx, grad_output):
        return grad_output / ctx.world_size


def step(model, shard, rank):
    ddp = DDP(model)
    context, target, probs = ddp(shard["feats"], shard["masked"])
    avg_probs = MeanOverRanks.apply(probs.mean(dim=(0, 1)))
    parts = {"contrastive": contrastive(context, target), "diversity": diversity(avg_probs)}
    total = parts["contrastive"] + DIVERSITY_WEIGHT * parts["diversity"]
    total.backward()
    return
