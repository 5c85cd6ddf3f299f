"""KTO preference tuning: desirable and undesirable completions are compared with a reference point,
the non-negative mean log ratio of mismatched completions over the global batch. Runs under DDP."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from ddp_equivalence import Case

VOCAB, WIDTH, LENGTH = 16, 10, 6
BETA = 0.5
WEIGHT_DESIRABLE, WEIGHT_UNDESIRABLE = 1.0, 1.3


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.rnn = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens):
        h, _ = self.rnn(self.embed(tokens))
        return self.head(h)


def build_model():
    return Policy()


def sequence_logp(model, tokens):
    logp = model(tokens[:, :-1]).log_softmax(dim=-1)
    return logp.gather(-1, tokens[:, 1:, None]).squeeze(-1).sum(dim=-1)


def kto_rows(policy_logp, ref_logp, desirable, reference_point):
    log_ratio = policy_logp - ref_logp
    gain = 1 - torch.sigmoid(BETA * (log_ratio - reference_point))
    pain = 1 - torch.sigmoid(BETA * (reference_point - log_ratio))
    return torch.where(desirable, WEIGHT_DESIRABLE * gain, WEIGHT_UNDESIRABLE * pain)


def loss(model, batch):
    with torch.no_grad():
        kl = sequence_logp(model, batch["kl_tokens"]) - batch["kl_ref_logp"]
        reference_point = kl.mean().clamp(min=0)
    policy_logp = sequence_logp(model, batch["tokens"])
    return kto_rows(policy_logp, batch["ref_logp"], batch["desirable"], reference_point).mean()


def make_batch(generator):
    rows = 16
    typical = -(LENGTH - 1) * torch.tensor(float(VOCAB)).log()
    drift = torch.where(torch.arange(rows) < rows // 2, 1.5, -3.0)
    noise = 0.2 * torch.randn(rows, generator=generator)
    return {
        "tokens": torch.randint(0, VOCAB, (rows, LENGTH), generator=generator),
        "kl_tokens": torch.randint(0, VOCAB, (rows, LENGTH), generator=generator),
        "ref_logp": typical + 0.5 * torch.randn(rows, generator=generator),
        "kl_ref_logp": typical + drift + noise,
        "desirable": torch.rand(rows, generator=generator) < 0.5,
    }


case = Case(model=build_model, batch=make_batch, loss=loss, layout="1x2")


@torch.no_grad()
def estimate_reference_point(policy, shard, world_size):
    """Batch estimate of the KL between policy and reference, never negative."""
    kl = sequence_logp(policy, shard["kl_tokens"]) - shard["kl_ref_logp"]
    point = kl.mean().clamp(min=0)
    dist.all_reduce(point, op=dist.ReduceOp.SUM)
    return point / world_size


def compute_loss(ddp, shard, world_size):
    reference_point = estimate_reference_point(ddp.module, shard, world_size)
    policy_logp = sequence_logp(ddp, shard["tokens"])
    rows = kto_rows(policy_logp, shard["ref_logp"], shard["desirable"], reference_point)
    return rows.mean(), reference_point


def step(model, shard, rank):
    ddp = DDP(model)
    train_loss, reference_point = compute_loss(ddp, shard, rank.world_size)
    train_loss.backward()
    return
