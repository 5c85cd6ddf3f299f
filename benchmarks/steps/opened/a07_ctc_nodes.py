"""Speech: CTC over frames. The loss is per character, so that long utterances count for more."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import ctc_loss
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

UTTERANCES, FRAMES, MEL, LETTERS, LONGEST = 8, 20, 10, 12, 7
BLANK = 0
GPUS_PER_NODE = 2


class Acoustic(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(MEL, 16, 5, padding=2)
        self.rnn = nn.GRU(16, 12, batch_first=True, bidirectional=True)
        self.proj = nn.Linear(24, LETTERS)

    def forward(self, mel):
        h = torch.relu(self.conv(mel.transpose(1, 2))).transpose(1, 2)
        return self.proj(self.rnn(h)[0]).log_softmax(-1)


def utterances(g):
    return {
        "mel": torch.randn(UTTERANCES, FRAMES, MEL, generator=g),
        "frames": torch.tensor([20, 14, 18, 20, 15, 20, 16, 19]),
        "text": torch.randint(1, LETTERS, (UTTERANCES, LONGEST), generator=g),
        "letters": torch.tensor([7, 2, 4, 6, 3, 1, 5, 7]),
    }


def summed_ctc(model, batch):
    log_probs = model(batch["mel"]).transpose(0, 1)
    return ctc_loss(
        log_probs,
        batch["text"],
        batch["frames"],
        batch["letters"],
        blank=BLANK,
        reduction="sum",
        zero_infinity=True,
    )


def loss(model, batch):
    return summed_ctc(model, batch) / batch["letters"].sum()


class Groups:
    """Process groups by purpose; logging goes over `node`, training over `world`."""

    def __init__(self):
        world, me = dist.get_world_size(), dist.get_rank()
        self.world = dist.group.WORLD
        self.node = None
        for first in range(0, world, GPUS_PER_NODE):
            members = list(range(first, first + GPUS_PER_NODE))
            group = dist.new_group(members)
            if me in members:
                self.node = group

    def size(self, group):
        return dist.get_world_size(group)


def letters_per_rank(letters, groups, group=None):
    """Mean number of letters on a rank: dividing by it makes DDP's mean a mean per letter."""
    group = group or groups.node
    total = letters.sum().double()
    dist.all_reduce(total, group=group)
    return total / groups.size(group)


def step(model, shard, rank):
    groups = Groups()
    ddp = DistributedDataParallel(model, process_group=groups.world)
    objective = summed_ctc(ddp, shard) / letters_per_rank(shard["letters"], groups)
    objective.backward()


case = Case(model=Acoustic, batch=utterances, loss=loss, layout="2x2")
