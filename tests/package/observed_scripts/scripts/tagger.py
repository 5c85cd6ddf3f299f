"""Trains a tagger: each rank sorts its rows by their length, as ``pack_padded_sequence`` asks. The
weight of the loss depends on the step.
"""

import start
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader, DistributedSampler

IGNORED = -100


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.recurrent = nn.GRU(8, 8, batch_first=True, bidirectional=True)
        self.head = nn.Linear(16, 5)

    def forward(self, words, lengths):
        packed = pack_padded_sequence(self.embedding(words), lengths, batch_first=True)
        states, _ = pad_packed_sequence(self.recurrent(packed)[0], batch_first=True)
        return self.head(states)


def collated(rows):
    rows = sorted(rows, key=lambda row: -len(row["words"]))
    return {
        "words": pad_sequence([row["words"] for row in rows], True),
        "tags": pad_sequence([row["tags"] for row in rows], True, padding_value=IGNORED),
        "lengths": torch.tensor([len(row["words"]) for row in rows]),
    }


def rows_of_data():
    for length in torch.randint(6, 12, (48,)).tolist():
        yield {
            "words": torch.randint(1, 20, (length,)),
            "tags": torch.randint(0, 5, (length,)),
        }


def train(options):
    torch.manual_seed(0)
    model = DistributedDataParallel(Tagger())
    data = list(rows_of_data())
    loader = DataLoader(data, 4, sampler=DistributedSampler(data), collate_fn=collated)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, batch in enumerate(loader):
        optimizer.zero_grad()
        found = model(batch["words"], batch["lengths"])
        tags = cross_entropy(
            found.flatten(0, 1), batch["tags"].flatten(), reduction="sum", ignore_index=IGNORED
        )
        loss = (1 + number) * tags
        loss = loss / len(batch["lengths"])
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    start.run(train)
