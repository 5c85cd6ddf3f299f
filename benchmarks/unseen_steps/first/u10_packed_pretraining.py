"""Pretraining on packed sequences: several documents share a row, attention stays inside a document.
The loss is averaged over the predicted tokens of the global batch, DDP averages over four ranks."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from ddp_equivalence import Case

VOCAB, WIDTH, LENGTH = 20, 12, 8
DOC_LENGTHS = [(3, 5), (8, 0), (4, 3), (5, 3), (2, 6), (8, 0), (3, 3), (6, 2)]
IGNORE = -100


class DocumentAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, doc_ids):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        same = doc_ids[:, :, None] == doc_ids[:, None, :]
        causal = torch.tril(torch.ones(x.size(1), x.size(1), dtype=torch.bool))
        scores = q @ k.transpose(1, 2) / WIDTH**0.5
        scores = scores.masked_fill(~(same & causal), float("-inf"))
        return x + self.out(scores.softmax(dim=-1) @ v)


class PackedLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.attn = DocumentAttention()
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 24), nn.GELU(), nn.Linear(24, WIDTH))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens, doc_ids):
        h = self.attn(self.embed(tokens), doc_ids)
        return self.head(h + self.mlp(h))


def build_model():
    return PackedLM()


def next_token_labels(tokens, doc_ids):
    """The next token inside the same document, IGNORE at document ends and padding."""
    labels = torch.full_like(tokens, IGNORE)
    inside = (doc_ids[:, 1:] == doc_ids[:, :-1]) & (doc_ids[:, 1:] > 0)
    labels[:, :-1] = torch.where(inside, tokens[:, 1:], labels[:, :-1])
    return labels


def token_loss_sum(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum")


def loss(model, batch):
    labels = next_token_labels(batch["tokens"], batch["doc_ids"])
    logits = model(batch["tokens"], batch["doc_ids"])
    return token_loss_sum(logits, labels) / (labels != IGNORE).sum()


def make_batch(generator):
    rows = 12
    tokens = torch.randint(1, VOCAB, (rows, LENGTH), generator=generator)
    doc_ids = torch.zeros(rows, LENGTH, dtype=torch.long)
    for row in range(rows):
        first, second = DOC_LENGTHS[row % len(DOC_LENGTHS)]
        doc_ids[row, :first] = 1
        doc_ids[row, first : first + second] = 2
    return {"tokens": tokens, "doc_ids": doc_ids}


case = Case(model=build_model, batch=make_batch, loss=loss, layout="1x4")


def tokens_per_rank(labels, world_size):
    """Average number of predicted tokens on a rank, the divisor that goes with DDP's mean."""
    count = torch.tensor([int((labels != IGNORE).sum())])
    dist.all_reduce(count)
    return count.item() // world_size


def step(model, shard, rank):
    ddp = DDP(model)
    labels = next_token_labels(shard["tokens"], shard["doc_ids"])
    divisor = tokens_per_rank(labels, rank.world_size)
    logits = ddp(shard["tokens"], shard["doc_ids"])
    train_loss = token_loss_sum(logits, labels) / max(divisor, 1)
    train_loss.backward()
    return
