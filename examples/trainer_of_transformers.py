"""Hugging Face's Trainer with a small Llama, two micro-batches a step, on two ranks.

ddp-equivalence check examples/trainer_of_transformers.py
ddp-equivalence check examples/trainer_of_transformers.py:step_of_rank_means
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from ddp_equivalence import Case
from ddp_equivalence.adapters.transformers import trainer_step

WORDS, WIDTH, PROMPT = 53, 14, 3


def build_model() -> nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WORDS,
            hidden_size=8,
            intermediate_size=12,
            num_hidden_layers=1,
            num_attention_heads=2,
            use_cache=False,
        )
    )


def rows(generator: torch.Generator) -> dict[str, Tensor]:
    """Eight rows: a prompt of three words, an answer of 1 to 11 words, and padding."""
    words = torch.randint(3, WORDS, (8, WIDTH), generator=generator)
    real = torch.arange(WIDTH) < PROMPT + torch.tensor([1, 2, 4, 5, 7, 8, 10, 11])[:, None]
    answer = real & (torch.arange(WIDTH) >= PROMPT)
    return {
        "input_ids": words.where(real, 0),
        "attention_mask": real.long(),
        "labels": words.where(answer, -100),
    }


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch).loss


# "own": every rank receives all rows, and the Trainer deals them to the ranks.
case = Case(model=build_model, batch=rows, loss=loss, layout="1x2", shards="own")
options = {"compare": "update"}

# Right: the Trainer divides by the number of answer words on all ranks and in all micro-batches.
step = trainer_step(gradient_accumulation_steps=2, average_tokens_across_devices=True)

# Wrong: every rank divides by its own number of words, as Trainers did by default before 4.54.
step_of_rank_means = trainer_step(
    gradient_accumulation_steps=2, average_tokens_across_devices=False
)
