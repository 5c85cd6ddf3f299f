"""The trainers that ``--like`` knows: what each of them sets, and what it does that others do not.

Read in the sources of transformers 5.24, Accelerate 1.15 and Lightning 2.6, and in train.py of
nanoGPT at commit 3adf61e. Tests compare the first three with the installed releases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from typing import Any

from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.commands.explain.explanation import (
    UNCHANGED,
    LossFactor,
    Setup,
    check_choice,
    check_count,
)

Fields = dict[str, Any]
NANOGPT_BETAS = (Fraction(9, 10), Fraction(95, 100))


def setup_like(name: str, **given: Any) -> Setup:
    """A Setup with what this trainer sets, unless it is given.

    ``name``: one of PRESETS. ``given``: fields of Setup; None stands for one that is not given.
    ``accumulation`` is the trainer's own setting, and ``loss_times`` what the user multiplies by
    beside the trainer.

    Raises BadCase for a name that is none, and for fields that this trainer cannot have.
    """
    check_choice("like", name, tuple(PRESETS))
    if given.get("parallelism") is not None:
        right = f"left out with --like {name}, which stands for one process for each GPU (torchrun)"
        raise BadCase("parallelism", given["parallelism"], right)
    fields = {field: value for field, value in given.items() if value is not None}
    if fields.get("accumulation", 1) == 1:  # there is nothing to divide: Setup says so
        return Setup(like=name, **PRESETS[name](fields))
    divided = fields.pop("accumulation_divided", None)
    setup = Setup(like=name, **PRESETS[name](fields))
    if divided not in (None, setup.accumulation_divided):
        does = {True: "divides the loss by the micro-batches itself", False: "does not divide here"}
        right = f"left out with --like {name}, which {does[not divided]}"
        raise BadCase("accumulation_divided", divided, right)
    return setup


def _hf_trainer(given: Fields) -> Fields:
    """transformers.Trainer: ``num_items_in_batch`` and ``average_tokens_across_devices``."""
    fields: Fields = {"loss": "token-mean", "optimizer": "adamw", "sampler": "even-batches"} | given
    if fields["loss"] == "token-mean":
        fields.setdefault("tokens_over", "all-ranks")
    if fields.get("tokens_over") == "all-ranks":  # the Trainer itself multiplies, after the user
        factor = fields.get("loss_times", UNCHANGED)
        if isinstance(factor, LossFactor):  # a Setup refuses anything else
            fields["loss_times"] = LossFactor(factor.number, factor.power + 1)
    counted = fields.get("tokens_over", "micro-batch") != "micro-batch"
    return _divided(fields, not counted)


def _accelerate(given: Fields) -> Fields:
    return _divided({"sampler": "even-batches"} | given, True)


def _lightning(given: Fields) -> Fields:
    return _divided(given, True)


def _nanogpt(given: Fields) -> Fields:
    for field in ("examples", "drop_last", "sampler"):
        if given.get(field):
            right = "left out with --like nanogpt, which draws random windows and has no epochs"
            raise BadCase(field, given[field], right)
    ranks = 1
    for field in ("nodes", "ranks_per_node", "accumulation"):
        check_count(field, given.get(field, 1))
        ranks *= 1 if field == "accumulation" else given.get(field, 1)
    steps, rest = divmod(given.get("accumulation", ranks), ranks)
    if rest:
        right = (
            f"a multiple of the {ranks} ranks, over which nanoGPT divides its "
            "gradient_accumulation_steps"
        )
        raise BadCase("accumulation", given["accumulation"], right)
    fields: Fields = {"optimizer": "adamw"} | given | {"accumulation": steps}
    if fields["optimizer"] != "sgd":
        fields = {"betas": NANOGPT_BETAS} | fields
    return _divided(fields, True)


def _divided(fields: Fields, divided: bool) -> Fields:
    if fields.get("accumulation", 1) != 1:
        fields = {"accumulation_divided": divided} | fields
    return fields


PRESETS: Mapping[str, Callable[[Fields], Fields]] = {
    "hf-trainer": _hf_trainer,
    "accelerate": _accelerate,
    "lightning": _lightning,
    "nanogpt": _nanogpt,
}
"""The trainers by name, with the function that completes the fields of a Setup."""


def own_divisor(setup: Setup) -> int:
    """By what the trainer itself divides a loss that its user computes in another way."""
    return setup.accumulation if setup.like in ("accelerate", "lightning") else 1


def divisor_of_a_step(setup: Setup, rest: int) -> int:
    """By what accumulation divides in a step of ``rest`` micro-batches; 0 stands for a whole step.

    A loop of the user's own is taken to divide by as many as in the other steps.
    """
    if not setup.accumulation_divided:
        return 1
    own = setup.like == "hf-trainer" and setup.loss != "token-mean"
    return rest if rest and own else setup.accumulation


def preset_sentences(setup: Setup) -> Iterator[str]:
    """What the trainer of this setup does that its user may not know."""
    ranks, steps = setup.processes, setup.accumulation
    if setup.like == "hf-trainer":
        yield from _of_hf_trainer(setup)
    elif setup.like == "accelerate":
        yield (
            "Like Accelerate: accelerator.backward divides by gradient_accumulation_steps, also in "
            "a shorter last step of an epoch. With split_batches=True the batch size of the "
            "DataLoader is that of all processes together."
        )
        if ranks > 1:
            yield scheduler_of_accelerate(ranks)
    elif setup.like == "lightning":
        yield (
            'Like Lightning\'s Trainer(strategy="ddp"): it adds a DistributedSampler, and divides '
            "each loss by accumulate_grad_batches, also in a shorter last step of an epoch."
        )
    elif setup.like == "nanogpt":
        yield (
            f"Like train.py of nanoGPT: its gradient_accumulation_steps of {steps * ranks} are "
            f"those of all {ranks} ranks together, {steps} on each. All its sequences have equally "
            "many tokens, so that a mean over them is one over examples."
        )


def scheduler_of_accelerate(ranks: int) -> str:
    """What the scheduler that Accelerate has prepared does at every optimizer step."""
    return (
        f"A scheduler that Accelerate has prepared moves on by {ranks} steps at every optimizer "
        f"step (without split_batches), so set its length to epochs x steps of an epoch x {ranks}."
    )


def _of_hf_trainer(setup: Setup) -> Iterator[str]:
    if setup.loss != "token-mean":
        yield (
            "Like the Trainer of transformers with a model whose loss takes no token count: each "
            "loss is divided by the number of micro-batches, in a shorter last step by its own."
        )
    elif setup.tokens_over == "all-ranks":
        yield (
            "Like the Trainer of transformers 4.54 and later with a language model: the loss is a "
            "sum, divided by the tokens of all micro-batches and ranks, and multiplied by the "
            "world size (average_tokens_across_devices=True). For earlier releases from 4.46 on, "
            "give --tokens-over step; for a model whose loss takes no token count, --loss mean. "
            "Started by plain python on several GPUs, it takes nn.DataParallel instead."
        )
    elif setup.tokens_over == "step":
        yield (
            "Like the Trainer of transformers with average_tokens_across_devices=False, the "
            "default from 4.46 to 4.53: each rank divides by its own tokens."
        )
    else:
        yield (
            "Like the Trainer of transformers before 4.46: each micro-batch takes a mean over its "
            "own tokens, divided by the number of micro-batches."
        )
