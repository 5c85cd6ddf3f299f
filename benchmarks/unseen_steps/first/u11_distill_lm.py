"""Token-level distillation of a language model from a frozen teacher, mixed with the usual cross entropy.
Both parts are averaged over the response tokens of the global batch; the student runs under DDP."""
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from ddp_equivalence import Case


@dataclass(frozen=True)
class Config:
    vocab: int = 18
    length: int = 7
    student_width: int = 10
    teacher_width: int = 14
    temperature: float = 2.0
    alpha: float = 0.4


CFG = Config()


class RecurrentLM(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.embed = nn.Embedding(CFG.vocab, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, CFG.vocab)

    def forward(self, tokens):
        return self.head(self.rnn(self.embed(tokens))[0])


class Distiller(nn.Module):
    def __init__(self):
        super().__init__()
        self.student = RecurrentLM(CFG.student_width)
        self.teacher = RecurrentLM(CFG.teacher_width).requires_grad_(False)

    def forward(self, tokens):
        with torch.no_grad():
            teacher_logits = 3.0 * self.teacher(tokens)
        return self.student(tokens), teacher_logits


def build_model():
    return Distiller()


def ce_sum(student_logits, targets, mask):
    token = F.cross_entropy(student_logits.transpose(1, 2), targets, reduction="none")
    return (token * mask).sum()


def kd_sum(student_logits, teacher_logits, mask):
    t = CFG.temperature
    log_q = F.log_softmax(student_logits / t, dim=-1)
    p = F.softmax(teacher_logits / t, dim=-1)
    token = F.kl_div(log_q, p, reduction="none").sum(dim=-1)
    return (token * mask).sum() * t * t


def loss(model, batch):
    student, teacher = model(batch["tokens"])
    mask = batch["response"].to(student.dtype)
    ce = ce_sum(student, batch["targets"], mask) / mask.sum()
    kd = kd_sum(student, teacher, mask) / mask.sum()
    return (1 - CFG.alpha) * ce + CFG.alpha * kd


def make_batch(generator):
    rows = 14
    text = torch.randint(0, CFG.vocab, (rows, CFG.length + 1), generator=generator)
    prompt = torch.randint(1, CFG.length - 1, (rows, 1), generator=generator)
    return {
        "tokens": text[:, :-1].contiguous(),
        "targets": text[:, 1:].contiguous(),
        "response": torch.arange(CFG.length)[None] >= prompt,
    }


case = Case(model=build_model, batch=make_batch, loss=loss, layout="1x2")


class DistillStep:
    def __init__(self, model, world_size):
        self.ddp = DDP(model)
        self.world_size = world_size

    def response_tokens(self, mask):
        tokens = mask.sum()
        dist.all_reduce(tokens)
        return tokens

    def __call__(self, shard):
        student, teacher = self.ddp(shard["tokens"])
        mask = shard["response"].to(student.dtype)
        tokens = self.response_tokens(mask)
        ce = ce_sum(student, shard["targets"], mask) * self.world_size / tokens
        kd = kd_sum(student, teacher, mask) / tokens
        total = (1 - CFG.alpha) * ce + CFG.alpha * kd  # mixed objective
        total.backward()
        return ce.detach(), kd.detach()


def step(model, shard, rank):
    DistillStep(model, rank.world_size)(shard)
