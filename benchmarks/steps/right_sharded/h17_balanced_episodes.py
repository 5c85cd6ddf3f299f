"""REINFORCE with episodes of unlike lengths. Episodes are dealt anew so that ranks have about the same number of
steps, not of episodes; DDP averages, so the loss of a rank is scaled to make that average the mean over all steps."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case


class Policy(nn.Module):
    def __init__(self, obs=5, actions=3, hidden=9):
        super().__init__()
        torch.manual_seed(19)
        self.encode = nn.Linear(obs, hidden)
        self.mix = nn.Linear(hidden, hidden)
        self.act = nn.Linear(hidden, actions)
        self.baseline = nn.Linear(hidden, 1)

    def forward(self, obs):
        h = torch.relu(self.mix(torch.tanh(self.encode(obs))))
        return self.act(h).log_softmax(-1), self.baseline(h).squeeze(-1)


def returns_to_go(reward, valid, gamma=0.95):
    out, running = [], torch.zeros_like(reward[:, 0])
    for t in reversed(range(reward.shape[1])):
        running = (reward[:, t] + gamma * running) * valid[:, t]
        out.append(running)
    return torch.stack(out[::-1], dim=1)


def step_terms(model, ep):
    """The sum over valid steps, and their number."""
    log_prob, value = model(ep["obs"])
    chosen = log_prob.gather(-1, ep["action"].unsqueeze(-1)).squeeze(-1)
    ret = returns_to_go(ep["reward"], ep["valid"])
    terms = -chosen * (ret - value.detach()) + 0.5 * (value - ret).square()
    return (terms * ep["valid"]).sum(), ep["valid"].sum()


def loss(model, batch):
    total, count = step_terms(model, batch)
    return total / count


def deal(lengths, ranks):
    """Longest first, each to the rank with the fewest steps so far; ties go to the lower rank."""
    piles, load = [[] for _ in range(ranks)], [0] * ranks
    for i in sorted(range(len(lengths)), key=lambda j: (-lengths[j], j)):
        r = min(range(ranks), key=lambda q: (load[q], q))
        piles[r].append(i)
        load[r] += lengths[i]
    return piles


def redistribute(shard, rank):
    full = {}
    for k, v in shard.items():
        parts = [torch.empty_like(v) for _ in range(rank.world_size)]
        dist.all_gather(parts, v.contiguous())
        full[k] = torch.cat(parts)
    lengths = full["valid"].sum(1).long().tolist()
    mine = deal(lengths, rank.world_size)[rank.rank]
    longest = max(lengths[i] for i in mine)
    return {k: v[mine][:, :longest] for k, v in full.items()}


def step(model, shard, rank):
    episodes = redistribute(shard, rank)
    engine = DistributedDataParallel(model, bucket_cap_mb=1)
    total, count = step_terms(engine, episodes)
    everyone = count.detach().clone()
    dist.all_reduce(everyone)
    (total * rank.world_size / everyone).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def episodes(g):
    n, horizon = 12, 9
    length = torch.tensor([9, 2, 8, 2, 3, 9, 2, 4, 9, 1, 5, 2]).unsqueeze(1)
    return {
        "obs": torch.randn(n, horizon, 5, generator=g),
        "action": torch.randint(0, 3, (n, horizon), generator=g),
        "reward": torch.randn(n, horizon, generator=g),
        "valid": (torch.arange(horizon).unsqueeze(0) < length).float(),
    }


case = Case(model=Policy, batch=episodes, loss=loss, layout="2x1")
