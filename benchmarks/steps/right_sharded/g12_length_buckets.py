"""Frame-synchronous speech enhancement; utterances are dealt out anew so that all ranks work on about as many frames."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from ddp_equivalence import Case

MAX_FRAMES, BINS = 12, 5


class MaskEstimator(nn.Module):
    def __init__(self, hidden=9):
        super().__init__()
        self.norm = nn.LayerNorm(BINS)
        self.rnn = nn.LSTM(BINS, hidden, batch_first=True)
        self.mask = nn.Linear(hidden, BINS)

    def forward(self, noisy, frames):
        packed = pack_padded_sequence(self.norm(noisy), frames, batch_first=True, enforce_sorted=False)
        h, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=noisy.size(1))
        return torch.sigmoid(self.mask(h)) * noisy


def mixtures(generator):
    clean = torch.randn(12, MAX_FRAMES, BINS, generator=generator)
    noise = torch.randn(12, MAX_FRAMES, BINS, generator=generator)
    frames = torch.randint(2, MAX_FRAMES + 1, (12,), generator=generator)
    return {"noisy": clean + 0.5 * noise, "clean": clean, "frames": frames}


def squared_error(model, batch):
    valid = torch.arange(MAX_FRAMES) < batch["frames"].unsqueeze(1)
    error = model(batch["noisy"], batch["frames"].cpu()) - batch["clean"]
    return (error.square().mean(-1) * valid).sum()


def loss(model, batch):
    return squared_error(model, batch) / batch["frames"].sum()


class FrameBalancer:
    """Longest first, each to the rank with the fewest frames so far."""

    def __init__(self, rank, world):
        self.rank, self.world = rank, world

    def deal(self, frames):
        load, hands = [0] * self.world, [[] for _ in range(self.world)]
        for index in sorted(range(len(frames)), key=lambda i: (-frames[i], i)):
            poorest = load.index(min(load))
            load[poorest] += frames[index]
            hands[poorest].append(index)
        return hands[self.rank]

    def gather(self, tensor):
        parts = [torch.empty_like(tensor) for _ in range(self.world)]
        dist.all_gather(parts, tensor.contiguous())
        return torch.cat(parts)

    def __call__(self, shard):
        pool = {name: self.gather(values) for name, values in shard.items()}
        hand = self.deal(pool["frames"].tolist())
        return {name: values[hand] for name, values in pool.items()}


class EnhancementTrainer:
    def __init__(self, model, rank):
        self.model = model
        self.balance = FrameBalancer(rank.rank, rank.world_size)

    def training_step(self, shard):
        batch = self.balance(shard)
        frames = batch["frames"].sum()
        dist.all_reduce(frames)
        # sums over a rank's frames, divided by everybody's: to be added up, not averaged
        (squared_error(self.model, batch) / frames).backward()
        self.reduce()

    def reduce(self):
        params = list(self.model.parameters())
        flat = torch.cat([p.grad.flatten() for p in params])
        dist.all_reduce(flat)
        for p, g in zip(params, flat.split([p.numel() for p in params])):
            p.grad.copy_(g.view_as(p))


def step(model, shard, rank):
    EnhancementTrainer(model, rank).training_step(shard)


case = Case(model=MaskEstimator, batch=mixtures, loss=loss, layout="1x4")
