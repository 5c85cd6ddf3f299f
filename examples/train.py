"""Trains a model of characters on lines of different lengths. It is a script as one has it.

    torchrun --standalone --nproc-per-node 2 examples/train.py

Each rank divides by its own number of characters, as most scripts do. With ``--count-all`` it
divides by that of all ranks.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, DistributedSampler

IGNORED = -100


class Characters(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(128, 32)
        self.recurrent = nn.GRU(32, 64, batch_first=True)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(64, 128)

    def forward(self, characters):
        states, _ = self.recurrent(self.embedding(characters))
        return self.head(self.dropout(states))


def lines_of_text():
    lines = [line.strip() for line in nn.Transformer.__doc__.splitlines()]
    return [torch.tensor(list(line.encode("ascii"))) for line in lines if len(line) > 1]


def pad(lines):
    inputs = pad_sequence([line[:-1] for line in lines], batch_first=True)
    targets = pad_sequence([line[1:] for line in lines], True, padding_value=IGNORED)
    return {"inputs": inputs, "targets": targets}


def main():
    dist.init_process_group()
    torch.manual_seed(0)
    model = DistributedDataParallel(Characters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    lines = lines_of_text()
    sampler = DistributedSampler(lines, seed=1)
    loader = DataLoader(lines, batch_size=4, sampler=sampler, collate_fn=pad)
    for epoch in range(10):
        sampler.set_epoch(epoch)
        for batch in loader:
            optimizer.zero_grad()
            outputs, targets = model(batch["inputs"]).flatten(0, 1), batch["targets"].flatten()
            if "--count-all" in sys.argv:
                count = (targets != IGNORED).sum()
                dist.all_reduce(count)
                total = cross_entropy(outputs, targets, reduction="sum", ignore_index=IGNORED)
                loss = total / count * dist.get_world_size()
            else:
                loss = cross_entropy(outputs, targets, ignore_index=IGNORED)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
