"""GRPO: several completions per prompt, advantages relative to the group of the prompt.
A group may lie on more than one rank, so rewards are gathered first. Four ranks under DDP."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from ddp_equivalence import Case

VOCAB, WIDTH, LENGTH = 15, 10, 7
GROUP = 4
CLIP_LOW, CLIP_HIGH, KL_COEF = 0.2, 0.28, 0.04


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.rnn = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens):
        h, _ = self.rnn(self.embed(tokens[:, :-1]))
        logp = self.head(h).log_softmax(dim=-1)
        return logp.gather(-1, tokens[:, 1:, None]).squeeze(-1)


def build_model():
    return Policy()


def group_advantages(rewards):
    """Rewards relative to mean and spread of their group; completions of a prompt are neighbours."""
    grouped = rewards.view(-1, GROUP)
    mean = grouped.mean(dim=1, keepdim=True)
    std = grouped.std(dim=1, keepdim=True)
    return ((grouped - mean) / (std + 1e-4)).view(-1)


def grpo_loss(logp, batch, advantages):
    mask = batch["completion_mask"].to(logp.dtype)
    ratio = torch.exp(logp - batch["old_logp"])
    clipped = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
    adv = advantages.unsqueeze(1)
    gain = torch.min(ratio * adv, clipped * adv)
    delta = batch["ref_logp"] - logp
    kl = torch.exp(delta) - delta - 1
    per_token = -(gain - KL_COEF * kl)
    return ((per_token * mask).sum(dim=1) / mask.sum(dim=1)).mean()


def loss(model, batch):
    return grpo_loss(model(batch["tokens"]), batch, group_advantages(batch["reward"]))


def make_batch(generator):
    rows = 24
    base = -torch.tensor(float(VOCAB)).log()
    lengths = torch.randint(2, LENGTH, (rows, 1), generator=generator)
    return {
        "tokens": torch.randint(0, VOCAB, (rows, LENGTH), generator=generator),
        "completion_mask": torch.arange(LENGTH - 1)[None] < lengths,
        "old_logp": base + 0.1 * torch.randn(rows, LENGTH - 1, generator=generator),
        "ref_logp": base + 0.1 * torch.randn(rows, LENGTH - 1, generator=generator),
        "reward": torch.randn(rows, generator=generator),
    }


case = Case(model=build_model, batch=make_batch, loss=loss, layout="1x4")


def gather_rewards(reward, world_size):
    parts = [torch.empty_like(reward) for _ in range(world_size)]
    dist.all_gather(parts, reward.contiguous())
    return torch.cat(parts)


@torch.no_grad()
def local_advantages(shard, rank):
    rewards = gather_rewards(shard["reward"], rank.world_size)
    advantages = group_advantages(rewards)
    return advantages[rank.rank :: rank.world_size]


def step(model, shard, rank):
    ddp = DDP(model)
    advantages = local_advantages(shard, rank)
    logp = ddp(shard["tokens"])
    policy_loss = grpo_loss(logp, shard, advantages)
    policy_loss.backward()
    return
