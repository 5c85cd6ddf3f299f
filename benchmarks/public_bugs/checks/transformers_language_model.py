"""Trainer with a tiny Llama, and rows in which answers of unequal length are the targets."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from ddp_equivalence import Case
from ddp_equivalence.adapters.transformers import trainer_step

Batch = dict[str, Tensor]

WORDS, WIDTH, PROMPT = 53, 14, 3


def build_model() -> nn.Module:
    model: nn.Module = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WORDS,
            hidden_size=8,
            intermediate_size=12,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=32,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            use_cache=False,
        )
    )
    return model


def rows(generator: torch.Generator) -> Batch:
    """Eight rows: a prompt of three words, an answer of 1 to 11, and padding."""
    words = torch.randint(3, WORDS, (8, WIDTH), generator=generator)
    lengths = PROMPT + torch.tensor([1, 2, 4, 5, 7, 8, 10, 11])
    real = torch.arange(WIDTH) < lengths[:, None]
    answer = real & (torch.arange(WIDTH) >= PROMPT)
    return {
        "input_ids": words.where(real, 0),
        "attention_mask": real.long(),
        "labels": words.where(answer, -100),
    }


def loss(model: nn.Module, batch: Batch) -> Tensor:
    value: Tensor = model(**batch).loss
    return value


case = Case(
    model=build_model, batch=rows, loss=loss, layout="1x2", shards="own", dtype=torch.float32
)
options = {"compare": "update"}
step = trainer_step()
step_of_two_micro_batches = trainer_step(gradient_accumulation_steps=2)
