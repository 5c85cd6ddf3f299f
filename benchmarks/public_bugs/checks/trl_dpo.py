"""TRL's trainer for direct preference optimisation, two micro-batches a step."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor, nn
from torch.nn.functional import logsigmoid
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer

from ddp_equivalence import Case
from ddp_equivalence.adapters.transformers import trainer_step

Batch = dict[str, Tensor]

WORDS, END, BETA, PROMPT = 53, 2, 0.1, 3


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
    """Eight prompts of three words, each with two answers of four."""
    draw = partial(torch.randint, 3, WORDS, generator=generator)
    return {"prompt": draw((8, PROMPT)), "chosen": draw((8, 4)), "rejected": draw((8, 4))}


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """The model that the policy is compared with is the policy as it was before the first step."""
    margin = answer(model, batch, "chosen") - answer(model, batch, "rejected")
    return -logsigmoid(BETA * (margin - margin.detach())).mean()


def answer(model: nn.Module, batch: Batch, which: str) -> Tensor:
    """The log probability of the answer and the end of the text, given the prompt."""
    ends = torch.full_like(batch[which][:, :1], END)
    words = torch.cat([batch["prompt"], batch[which], ends], 1)
    logits = model(input_ids=words).logits[:, PROMPT - 1 : -1].log_softmax(-1)
    return logits.gather(2, words[:, PROMPT:, None]).sum((1, 2))


def texts(batch: Batch) -> Any:
    return Dataset.from_dict(
        {
            key: [" ".join(f"w{word}" for word in row) for row in values.tolist()]
            for key, values in batch.items()
        }
    )


def tokenizer() -> Any:
    names = ["<pad>", "<unknown>", "<end>", *(f"w{word}" for word in range(END + 1, WORDS))]
    words = Tokenizer(
        WordLevel({name: word for word, name in enumerate(names)}, unk_token="<unknown>")
    )
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", unk_token="<unknown>", eos_token="<end>"
    )


def trainer(**given: Any) -> Any:
    return DPOTrainer(processing_class=tokenizer(), **given)


case = Case(
    model=build_model, batch=rows, loss=loss, layout="1x2", shards="own", dtype=torch.float32
)
step = trainer_step(trainer, DPOConfig, dataset=texts, gradient_accumulation_steps=2, beta=BETA)
options = {"compare": "update"}
