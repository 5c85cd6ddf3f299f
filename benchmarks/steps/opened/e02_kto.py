# KTO (Ethayarajh et al.) on single answers with a thumbs up or a thumbs down.
# The baseline z0 is a batch estimate of KL(policy || reference) from mismatched answers; it is
# clamped at zero and carries no gradient.
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

VOCAB, LENGTH, ROWS = 40, 7, 16
BETA, W_GOOD, W_BAD = 0.3, 1.0, 1.33


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 20)
        self.rnn = nn.GRU(20, 28, batch_first=True)
        self.lm_head = nn.Linear(28, VOCAB)

    def forward(self, ids, answer_mask):
        hidden, _ = self.rnn(self.embed(ids[:, :-1]))
        logps = self.lm_head(hidden).log_softmax(-1)
        picked = logps.gather(-1, ids[:, 1:, None]).squeeze(-1)
        return (picked * answer_mask[:, 1:]).sum(-1)


def feedback(generator):
    def ids():
        return torch.randint(VOCAB, (ROWS, LENGTH), generator=generator)

    def mask():
        start = torch.randint(1, 4, (ROWS, 1), generator=generator)
        return (torch.arange(LENGTH) >= start).float()

    answers, answer_mask, others, other_mask = ids(), mask(), ids(), mask()
    # answers are sorted by topic, and the reference is better at some topics than at others
    drift = torch.linspace(3, -4, ROWS) + torch.randn(ROWS, generator=generator)
    per_token = -torch.log(torch.tensor(float(VOCAB)))
    return {
        "ids": answers,
        "mask": answer_mask,
        "kl_ids": others,
        "kl_mask": other_mask,
        # log probabilities of the frozen reference model, computed when the data was prepared
        "ref": per_token * answer_mask[:, 1:].sum(1) + torch.randn(ROWS, generator=generator),
        "kl_ref": per_token * other_mask[:, 1:].sum(1) + drift,
        "good": torch.rand(ROWS, generator=generator) > 0.4,
    }


def log_ratios(model, batch):
    # one forward for both halves, as DDP wants it
    logps = model(
        torch.cat([batch["ids"], batch["kl_ids"]]), torch.cat([batch["mask"], batch["kl_mask"]])
    )
    mine, other = logps.chunk(2)
    return mine - batch["ref"], (other - batch["kl_ref"]).detach()


def kto(ratio, z0, good):
    desirable = W_GOOD * (1 - torch.sigmoid(BETA * (ratio - z0)))
    undesirable = W_BAD * (1 - torch.sigmoid(BETA * (z0 - ratio)))
    return torch.where(good, desirable, undesirable).mean()


def loss(model, batch):
    ratio, kl = log_ratios(model, batch)
    return kto(ratio, kl.mean().clamp(min=0), batch["good"])


case = Case(model=Policy, batch=feedback, loss=loss, layout="1x4")


def average_over_ranks(value):
    value = value.clone()
    dist.all_reduce(value, op=dist.ReduceOp.SUM)
    return value / dist.get_world_size()


def step(model, shard, rank):
    ddp = DistributedDataParallel(model)
    ratio, kl = log_ratios(ddp, shard)
    z0 = average_over_ranks(kl.mean().clamp(min=0))
    kto(ratio, z0, shard["good"]).backward()
