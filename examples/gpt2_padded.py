"""A tiny GPT-2 on paragraphs grouped by length: the mean over tokens is not the mean over ranks.

ddp-equivalence check examples/gpt2_padded.py
ddp-equivalence check examples/gpt2_padded.py:step_rank_mean
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel

from ddp_equivalence import Case, Rank

TEXT = Path(__file__).resolve().parent.parent / "LICENSE"
PARAGRAPHS = 8
LONGEST = 256  # bytes; a longer paragraph is cut
PADDING = 256  # the token after the 256 bytes
IGNORED = -100  # the label that cross_entropy leaves out

Batch = dict[str, Tensor]  # input_ids, attention_mask, labels: (PARAGRAPHS, LONGEST)


def build_model() -> nn.Module:
    """A GPT-2 with random weights and no dropout."""
    config = GPT2Config(
        vocab_size=257,
        n_positions=LONGEST,
        n_embd=32,
        n_layer=2,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=PADDING,
        eos_token_id=PADDING,
        use_cache=False,
    )
    return GPT2LMHeadModel(config)


def some_paragraphs(generator: torch.Generator) -> Batch:
    """Random paragraphs, the short ones first, as samplers that group by length order them."""
    paragraphs = [b" ".join(text.split()) for text in TEXT.read_bytes().split(b"\n\n")]
    paragraphs = [paragraph for paragraph in paragraphs if paragraph]
    chosen = torch.randperm(len(paragraphs), generator=generator)[:PARAGRAPHS].tolist()
    chosen.sort(key=lambda number: len(paragraphs[number]))
    input_ids = torch.full((PARAGRAPHS, LONGEST), PADDING)
    for row, number in enumerate(chosen):
        paragraph = torch.tensor(list(paragraphs[number][:LONGEST]))
        input_ids[row, : len(paragraph)] = paragraph
    is_text = input_ids != PADDING
    labels = input_ids.masked_fill(~is_text, IGNORED)
    return {"input_ids": input_ids, "attention_mask": is_text.long(), "labels": labels}


def next_tokens(batch: Batch) -> Tensor:
    """The labels that have a token before them."""
    return batch["labels"][:, 1:]


def cross_entropy(model: nn.Module, batch: Batch, reduction: str) -> Tensor:
    # Not the loss that GPT-2 returns: that one is float32, even if the model is float64.
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return F.cross_entropy(
        logits[:, :-1].flatten(0, 1),
        next_tokens(batch).flatten(),
        ignore_index=IGNORED,
        reduction=reduction,
    )


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """The mean over all tokens that are not padding."""
    return cross_entropy(model, batch, reduction="mean")


case = Case(model=build_model, batch=some_paragraphs, loss=loss, layout="1x2")


def step_global_mean(model: nn.Module, shard: Batch, rank: Rank) -> None:
    """Right: every rank divides by the tokens of all ranks, and undoes DDP's division."""
    ddp = DistributedDataParallel(model)
    tokens = (next_tokens(shard) != IGNORED).sum()
    dist.all_reduce(tokens)
    total = cross_entropy(ddp, shard, reduction="sum")
    (rank.world_size * total / tokens).backward()


def step_rank_mean(model: nn.Module, shard: Batch, rank: Rank) -> None:
    """Wrong but common: a token counts more on a rank with fewer tokens."""
    ddp = DistributedDataParallel(model)
    loss(ddp, shard).backward()


step = step_global_mean
