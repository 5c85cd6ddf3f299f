"""LoRA fine-tuning of a small text classifier: the base is frozen, adapters, norms and the new head train.
Gradients of the trained parts are averaged by hand over the ranks."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from ddp_equivalence import Case

VOCAB, WIDTH, LENGTH, CLASSES, LORA_RANK = 24, 12, 6, 3, 2


class LoRALinear(nn.Module):
    def __init__(self, n_in, n_out, alpha=4.0):
        super().__init__()
        self.base = nn.Linear(n_in, n_out)
        self.lora_a = nn.Parameter(torch.randn(LORA_RANK, n_in) * 0.2)
        self.lora_b = nn.Parameter(torch.randn(n_out, LORA_RANK) * 0.2)
        self.scaling = alpha / LORA_RANK

    def forward(self, x):
        return self.base(x) + self.scaling * (x @ self.lora_a.t()) @ self.lora_b.t()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = LoRALinear(WIDTH, 20)
        self.down = LoRALinear(20, WIDTH)

    def forward(self, x):
        mixed = x + x.mean(dim=1, keepdim=True)
        return x + self.down(F.gelu(self.up(self.norm(mixed))))


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens):
        return self.head(self.blocks(self.embed(tokens)).mean(dim=1))


TRAINED = ("lora_", "norm", "head")


def build_model():
    model = Classifier()
    for name, p in model.named_parameters():
        p.requires_grad_(any(part in name for part in TRAINED))
    return model


def classification_loss(model, batch):
    return F.cross_entropy(model(batch["tokens"]), batch["label"])


def loss(model, batch):
    return classification_loss(model, batch)


def make_batch(generator):
    rows = 12
    return {
        "tokens": torch.randint(0, VOCAB, (rows, LENGTH), generator=generator),
        "label": torch.randint(0, CLASSES, (rows,), generator=generator),
    }


case = Case(model=build_model, batch=make_batch, loss=loss, layout="1x2")


def adapter_parameters(model):
    """The parameters that are trained and saved with the adapter."""
    for name, p in model.named_parameters():
        if "lora_" in name or name.startswith("head"):
            yield p


@torch.no_grad()
def average_gradients(params, world_size):
    grads = [p.grad for p in params]
    flat = torch.cat([g.reshape(-1) for g in grads])
    dist.all_reduce(flat)
    flat /= world_size
    for g, piece in zip(grads, flat.split([g.numel() for g in grads])):
        g.copy_(piece.view_as(g))


def step(model, shard, rank):
    train_loss = classification_loss(model, shard)
    train_loss.backward()
    average_gradients(adapter_parameters(model), rank.world_size)
    return
