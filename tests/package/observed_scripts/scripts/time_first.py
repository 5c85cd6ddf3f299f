"""Trains a language model on batches whose dim 0 is the time, as recurrent layers take them."""

import start
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

WORDS, PADDING = 30, 0


class Words(nn.Module):
    def __init__(self, drop):
        super().__init__()
        self.embedded, self.drop = nn.Embedding(WORDS, 16), nn.Dropout(drop)
        self.recurrent, self.out = nn.LSTM(16, 16), nn.Linear(16, WORDS)

    def forward(self, words):
        return self.out(self.recurrent(self.drop(self.embedded(words)))[0])


def train(options):
    torch.manual_seed(0)
    ragged = "ragged" in options
    lengths = [5 + (number * 7 % 6 if ragged else 0) for number in range(48)]
    texts = [torch.randint(1, WORDS, (length + 1,)) for length in lengths]

    def in_columns(rows):
        words = nn.utils.rnn.pad_sequence(rows, padding_value=PADDING)
        return words[:-1], words[1:]

    loader = DataLoader(texts, 4, sampler=DistributedSampler(texts), collate_fn=in_columns)
    model = DistributedDataParallel(Words(0.2 if "dropout" in options else 0.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reduction = "sum" if "sum" in options else "mean"
    for words, following in loader:
        optimizer.zero_grad()
        logits = model(words).flatten(0, 1)
        loss = cross_entropy(logits, following.flatten(), ignore_index=PADDING, reduction=reduction)
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    start.run(train)
