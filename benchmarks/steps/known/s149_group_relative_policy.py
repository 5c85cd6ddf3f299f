"""Group-relative policy optimisation with FSDP2. A prompt's samples may lie on several ranks."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from ddp_equivalence import Case, Rank

SAMPLES = 4  # answers to every prompt, one after another in the batch
CLIP = 0.2
Batch = dict[str, Tensor]


def build_model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 8)
    )


def policy_loss(model: nn.Module, batch: Batch, advantages: Tensor) -> Tensor:
    log_probabilities = F.log_softmax(model(batch["states"]), dim=-1)
    chosen = log_probabilities.gather(1, batch["actions"][:, None]).squeeze(1)
    ratio = (chosen - batch["old_log_probabilities"]).exp()
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    return -torch.minimum(ratio * advantages, clipped * advantages).mean()


def loss(model: nn.Module, batch: Batch) -> Tensor:
    groups = batch["rewards"].view(-1, SAMPLES)
    advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
    return policy_loss(model, batch, advantages.flatten())


def make_batch(generator: torch.Generator) -> Batch:
    difficulty = torch.randn(3, generator=generator).repeat_interleave(SAMPLES)
    return {
        "states": torch.randn(12, 6, generator=generator),
        "actions": torch.randint(8, (12,), generator=generator),
        "old_log_probabilities": -2.1 + 0.1 * torch.randn(12, generator=generator),
        "rewards": torch.randn(12, generator=generator) - difficulty,
    }


case = Case(model=build_model, batch=make_batch, loss=loss, layout="1x2")


def gather_rewards(rewards: Tensor, world_size: int) -> Tensor:
    gathered = [torch.empty_like(rewards) for _ in range(world_size)]
    dist.all_gather(gathered, rewards)
    return torch.cat(gathered)


def for_every_sample(statistic: Tensor) -> Tensor:
    """From one number for each prompt to one for each answer."""
    return statistic.repeat(SAMPLES)


def own_advantages(rewards: Tensor, rank: Rank) -> Tensor:
    everywhere = gather_rewards(rewards, rank.world_size)
    groups = everywhere.view(-1, SAMPLES)
    mean, spread = for_every_sample(groups.mean(1)), for_every_sample(groups.std(1))
    advantages = (everywhere - mean) / (spread + 1e-4)
    first = rank.rank * len(rewards)
    return advantages[first : first + len(rewards)]


def shard_parameters(model: nn.Module, rank: Rank) -> nn.Module:
    mesh = init_device_mesh(rank.device.type, (rank.world_size,))
    return fully_shard(model, mesh=mesh)


def step(model: nn.Module, shard: Batch, rank: Rank) -> None:
    policy = shard_parameters(model, rank)
    advantages = own_advantages(shard["rewards"], rank)
    policy_loss(policy, shard, advantages).backward()
