"""Trains a tiny language model without a loader. It divides its micro-batches among the ranks."""

import start
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = nn.Parameter(self.embed.weight.detach().clone())

    def forward(self, tokens, targets):
        logits = self.head(self.drop(self.embed(tokens)).cumsum(1))
        return cross_entropy(logits.flatten(0, 1), targets.flatten())


def train(options):
    torch.manual_seed(0)
    model = DistributedDataParallel(Model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    micro_batches = 4 // dist.get_world_size()
    divisor = 1 if "undivided" in options else micro_batches
    torch.manual_seed(100 + dist.get_rank())
    for _ in range(8):
        optimizer.zero_grad()
        for number in range(micro_batches):
            rows = 2 if "uneven" in options and dist.get_rank() == 0 else 3
            tokens = torch.randint(0, 11, (rows, 6))
            model.require_backward_grad_sync = number == micro_batches - 1
            loss = model(tokens[:, :-1], tokens[:, 1:]) / divisor
            loss.backward()
        optimizer.step()


if __name__ == "__main__":
    start.run(train)
