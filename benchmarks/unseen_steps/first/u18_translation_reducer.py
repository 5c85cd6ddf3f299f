"""A sequence-to-sequence translation model with shared input and output embeddings.
The loss is divided by the global number of target tokens, gradients are summed module by module."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from ddp_equivalence import Case

VOCAB, WIDTH, SRC, TGT = 22, 10, 7, 6
PAD, BOS = 0, 1


class Seq2Seq(nn.Module):
    def __init__(self):
        super().__init__()
        self.source = nn.Embedding(VOCAB, WIDTH)
        self.target = nn.Embedding(VOCAB, WIDTH)
        self.encoder = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.decoder = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.attend = nn.Linear(2 * WIDTH, WIDTH)
        self.generator = nn.Linear(WIDTH, VOCAB)
        self.generator.weight = self.target.weight

    def forward(self, src, tgt_in):
        memory, last = self.encoder(self.source(src))
        states, _ = self.decoder(self.target(tgt_in), last)
        scores = states @ memory.transpose(1, 2) / WIDTH**0.5
        scores = scores.masked_fill((src == PAD)[:, None, :], float("-inf"))
        context = scores.softmax(dim=-1) @ memory
        return self.generator(torch.tanh(self.attend(torch.cat([states, context], dim=-1))))


def build_model():
    return Seq2Seq()


def token_loss(model, batch, denominator):
    tgt = batch["tgt"]
    bos = torch.full_like(tgt[:, :1], BOS)
    logits = model(batch["src"], torch.cat([bos, tgt[:, :-1]], dim=1))
    total = F.cross_entropy(logits.flatten(0, 1), tgt.flatten(), ignore_index=PAD, reduction="sum")
    return total / denominator


def loss(model, batch):
    return token_loss(model, batch, (batch["tgt"] != PAD).sum())


def padded_text(rows, length, generator):
    text = torch.randint(2, VOCAB, (rows, length), generator=generator)
    sizes = torch.randint(2, length + 1, (rows, 1), generator=generator)
    return text.masked_fill(torch.arange(length)[None] >= sizes, PAD)


def make_batch(generator):
    rows = 12
    return {"src": padded_text(rows, SRC, generator), "tgt": padded_text(rows, TGT, generator)}


case = Case(model=build_model, batch=make_batch, loss=loss, shards="5+7")


class ModuleReducer:
    """One flat all-reduce per leaf module, last modules first."""

    def __init__(self, module):
        self.modules = [m for m in module.modules() if list(m.parameters(recurse=False))]

    @torch.no_grad()
    def reduce(self):
        for module in reversed(self.modules):
            self._reduce_module(module)

    def _reduce_module(self, module):
        grads = [p.grad for p in module.parameters(recurse=False)]
        flat = torch.cat([g.reshape(-1) for g in grads])
        dist.all_reduce(flat, op=dist.ReduceOp.SUM)
        offset = 0
        for g in grads:
            g.copy_(flat[offset : offset + g.numel()].view_as(g))
            offset += g.numel()


def step(model, shard, rank):
    tokens = (shard["tgt"] != PAD).sum()
    dist.all_reduce(tokens)
    train_loss = token_loss(model, shard, tokens)
    train_loss.backward()
    ModuleReducer(model).reduce()
    return
