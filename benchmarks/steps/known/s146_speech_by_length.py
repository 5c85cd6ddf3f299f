"""A CTC speech recogniser. Short and long utterances of a rank go through the model separately."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from ddp_equivalence import Case, Rank

SYMBOLS = 6
Batch = dict[str, Tensor]


class Recogniser(nn.Module):
    """Bidirectional, so every utterance has to end where its frames end."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.GRU(5, 6, batch_first=True, bidirectional=True)
        self.symbols = nn.Linear(12, SYMBOLS)

    def forward(self, frames: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(frames, lengths.cpu(), batch_first=True, enforce_sorted=False)
        encoded, _ = pad_packed_sequence(
            self.encoder(packed)[0], batch_first=True, total_length=frames.shape[1]
        )
        return self.symbols(encoded).log_softmax(-1)


def summed_ctc(log_probabilities: Tensor, batch: Batch) -> Tensor:
    return F.ctc_loss(
        log_probabilities.transpose(0, 1),
        batch["text"],
        batch["frame_counts"],
        batch["text_lengths"],
        reduction="sum",
    )


def loss(model: nn.Module, batch: Batch) -> Tensor:
    log_probabilities = model(batch["frames"], batch["frame_counts"])
    return summed_ctc(log_probabilities, batch) / batch["text_lengths"].sum()


def make_batch(generator: torch.Generator) -> Batch:
    return {
        "frames": torch.randn(16, 14, 5, generator=generator),
        "frame_counts": torch.randint(7, 15, (16,), generator=generator),
        "text": torch.randint(1, SYMBOLS, (16, 3), generator=generator),
        "text_lengths": torch.randint(1, 4, (16,), generator=generator),
    }


case = Case(model=Recogniser, batch=make_batch, loss=loss, layout="1x2")


def recognise(model: nn.Module, batch: Batch) -> Tensor:
    """Short utterances are cut to the longest among them, which saves half of the padding."""
    frames, counts = batch["frames"], batch["frame_counts"]
    order = counts.argsort(stable=True)
    outputs = []
    for chosen in order.chunk(2):
        longest = int(counts[chosen].max())
        output = model(frames[chosen, :longest], counts[chosen])
        outputs.append(F.pad(output, (0, 0, 0, frames.shape[1] - longest)))
    return torch.cat(outputs)[order]


def letters_of_all_ranks(batch: Batch) -> Tensor:
    letters = batch["text_lengths"].sum()
    dist.all_reduce(letters)
    return letters


def step(model: nn.Module, shard: Batch, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    summed = summed_ctc(recognise(ddp, shard), shard)
    (rank.world_size * summed / letters_of_all_ranks(shard)).backward()
