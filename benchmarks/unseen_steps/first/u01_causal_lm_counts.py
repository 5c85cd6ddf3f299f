"""A small causal language model on padded text, trained with DDP.
The loss is the mean cross entropy over all predicted tokens of the global batch."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from ddp_equivalence import Case

VOCAB = 23
MAX_LEN = 9
WIDTH = 12


class CausalMixer(nn.Module):
    """Causal averaging of the past instead of attention."""

    def __init__(self, width):
        super().__init__()
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        length = x.size(1)
        tril = torch.tril(torch.ones(length, length, dtype=x.dtype, device=x.device))
        weights = tril / tril.sum(dim=-1, keepdim=True)
        return x + self.out(F.gelu(weights @ self.value(self.norm(x))))


class TinyLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, WIDTH)
        self.pos = nn.Embedding(MAX_LEN, WIDTH)
        self.blocks = nn.ModuleList(CausalMixer(WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, input_ids):
        positions = torch.arange(input_ids.size(1), device=input_ids.device)
        x = self.tok(input_ids) + self.pos(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build_model():
    return TinyLM()


def shifted_nll(logits, input_ids, attention_mask):
    """Sum of the token losses of the next-token prediction."""
    logits = logits[:, :-1].reshape(-1, VOCAB)
    targets = input_ids[:, 1:].reshape(-1)
    keep = attention_mask[:, 1:].reshape(-1).to(logits.dtype)
    return (F.cross_entropy(logits, targets, reduction="none") * keep).sum()


def loss(model, batch):
    total = shifted_nll(model(batch["input_ids"]), batch["input_ids"], batch["attention_mask"])
    return total / batch["attention_mask"][:, 1:].sum()


def make_batch(generator):
    rows = 16
    input_ids = torch.randint(1, VOCAB, (rows, MAX_LEN), generator=generator)
    lengths = torch.randint(3, MAX_LEN + 1, (rows,), generator=generator)
    attention_mask = (torch.arange(MAX_LEN)[None] < lengths[:, None]).long()
    return {"input_ids": input_ids * attention_mask, "attention_mask": attention_mask}


case = Case(model=build_model, batch=make_batch, loss=loss, layout="1x2")


def global_num_tokens(attention_mask):
    """Number of tokens in the batch of all ranks."""
    count = attention_mask.sum()
    dist.all_reduce(count, op=dist.ReduceOp.SUM)
    return count


def training_step(ddp_model, shard, world_size):
    num_tokens = global_num_tokens(shard["attention_mask"])
    logits = ddp_model(shard["input_ids"])
    nll = shifted_nll(logits, shard["input_ids"], shard["attention_mask"])
    return nll * world_size / num_tokens


def step(model, shard, rank):
    ddp_model = DDP(model)
    train_loss = training_step(ddp_model, shard, rank.world_size)
    train_loss.backward()
    return
