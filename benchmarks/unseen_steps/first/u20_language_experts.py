"""Multilingual tagging with one expert per language and a shared trunk. Batches are ordered by language,
so a rank does not use every expert. Gradients are reduced by hand, separately for trunk and experts."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from ddp_equivalence import Case

VOCAB, WIDTH, LENGTH, TAGS, LANGUAGES = 26, 10, 6, 5, 3


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, 14)
        self.outer = nn.Linear(14, WIDTH)

    def forward(self, x):
        return x + self.outer(F.silu(self.inner(x)))


class MultilingualTagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.trunk = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.experts = nn.ModuleList(Expert() for _ in range(LANGUAGES))
        self.head = nn.Linear(WIDTH, TAGS)

    def forward(self, tokens, language):
        h, _ = self.trunk(self.embed(tokens))
        routed = torch.zeros_like(h)
        for index, expert in enumerate(self.experts):
            rows = (language == index).nonzero().squeeze(1)
            if len(rows):
                routed = routed.index_copy(0, rows, expert(h[rows]))
        return self.head(routed)


def build_model():
    return MultilingualTagger()


def tagging_loss(model, batch):
    logits = model(batch["tokens"], batch["language"])
    return F.cross_entropy(logits.flatten(0, 1), batch["tags"].flatten())


def loss(model, batch):
    return tagging_loss(model, batch)


def make_batch(generator):
    rows = 12
    return {
        "tokens": torch.randint(0, VOCAB, (rows, LENGTH), generator=generator),
        "tags": torch.randint(0, TAGS, (rows, LENGTH), generator=generator),
        "language": torch.arange(rows) * LANGUAGES // rows,
    }


case = Case(model=build_model, batch=make_batch, loss=loss, layout="1x2")


@torch.no_grad()
def reduce_dense(params, world_size):
    for p in params:
        dist.all_reduce(p.grad, op=dist.ReduceOp.SUM)
        p.grad.div_(world_size)


@torch.no_grad()
def reduce_expert(expert, world_size):
    """An expert without tokens has no gradient here, but takes part in the collective."""
    params = list(expert.parameters())
    used = params[0].grad is not None
    active = torch.tensor([float(used)])
    dist.all_reduce(active)
    for p in params:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        dist.all_reduce(p.grad, op=dist.ReduceOp.SUM)
        p.grad.div_(active.clamp(min=1))


def step(model, shard, rank):
    model.zero_grad(set_to_none=True)
    train_loss = tagging_loss(model, shard)
    train_loss.backward()

    dense = [p for name, p in model.named_parameters() if not name.startswith("experts")]
    reduce_dense(dense, rank.world_size)
    for expert in model.experts:
        reduce_expert(expert, rank.world_size)
    return
