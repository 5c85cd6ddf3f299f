"""Public bugs of released libraries, each with a version that has it and one that does not."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PublicBug:
    """A bug, and how to see it.

    ``check``: the file in ``checks`` that is judged with both versions, or FILE:STEP for another
    step than the one called step. ``wrong`` and ``right``: what is installed, beside torch and this
    package. ``both``: what is installed with either.
    ``cause``: the name that the wrong version must get; None if it gets none. ``why_open``: why a
    candidate is not one of BUGS.
    """

    name: str
    says: str
    urls: tuple[str, ...]
    check: str
    wrong: tuple[str, ...]
    right: tuple[str, ...]
    cause: str | None
    both: tuple[str, ...] = ()
    why_open: str = ""


BUGS = (
    PublicBug(
        name="transformers-accumulation",
        says="Trainer takes the mean of each micro-batch over its own tokens",
        urls=(
            "https://github.com/huggingface/transformers/pull/34191",
            "https://github.com/huggingface/blog/pull/2414",
        ),
        check="transformers_language_model.py:step_of_two_micro_batches",
        wrong=("transformers==4.45.2", "accelerate==1.0.1"),
        right=("transformers==4.54.1", "accelerate==1.8.1"),
        cause="token_counts_weighted_equally",
    ),
    PublicBug(
        name="transformers-tokens-of-ranks",
        says="Trainer takes the mean of each rank over its own tokens, by default",
        urls=(
            "https://github.com/huggingface/transformers/issues/34242",
            "https://github.com/huggingface/transformers/pull/39395",
        ),
        check="transformers_language_model.py",
        wrong=("transformers==4.53.3", "accelerate==1.8.1"),
        right=("transformers==4.54.1", "accelerate==1.8.1"),
        cause="token_counts_weighted_equally",
    ),
    PublicBug(
        name="transformers-own-model",
        says="Trainer does not divide by the micro-batches if the model takes no loss arguments",
        urls=(
            "https://github.com/huggingface/transformers/pull/35207",
            "https://github.com/huggingface/transformers/issues/37766",
        ),
        check="transformers_own_model.py",
        wrong=("transformers==4.47.0", "accelerate==1.2.1"),
        right=("transformers==4.48.1", "accelerate==1.2.1"),
        cause="accumulation_not_divided",
    ),
    PublicBug(
        name="trl-dpo",
        says="DPOTrainer does not divide by the micro-batches",
        urls=(
            "https://github.com/huggingface/trl/pull/2615",
            "https://github.com/huggingface/transformers/issues/35856",
        ),
        check="trl_dpo.py",
        wrong=("trl==0.13.0",),
        right=("trl==0.14.0",),
        both=("transformers==4.48.1", "accelerate==1.2.1"),
        cause="accumulation_not_divided",
    ),
    PublicBug(
        name="accelerate-shuffle",
        says="without a seed, every rank shuffles in an order of its own",
        urls=(
            "https://github.com/huggingface/accelerate/issues/2268",
            "https://github.com/huggingface/accelerate/pull/2694",
        ),
        check="accelerate_shuffle.py",
        wrong=("accelerate==0.29.3",),
        right=("accelerate==0.30.0",),
        both=("numpy<2",),
        cause="ranks_shuffle_apart",
    ),
    PublicBug(
        name="lightning-shuffle",
        says="without a seed, every rank shuffles in an order of its own",
        urls=("https://github.com/Lightning-AI/pytorch-lightning/pull/17713",),
        check="lightning_shuffle.py",
        wrong=("pytorch-lightning==2.0.2",),
        right=("pytorch-lightning==2.0.3",),
        both=("setuptools<80",),
        cause="ranks_shuffle_apart",
    ),
    PublicBug(
        name="lightly-ntxent",
        says="the gathered negatives of other ranks get no gradient",
        urls=(
            "https://github.com/lightly-ai/lightly/issues/1528",
            "https://github.com/lightly-ai/lightly/pull/1531",
        ),
        check="lightly_ntxent.py",
        wrong=("lightly==1.5.2",),
        right=("lightly==1.5.4",),
        both=("numpy<2",),
        cause=None,
    ),
    PublicBug(
        name="lightly-sigreg",
        says="the characteristic function is summed over ranks by an all-reduce without a gradient",
        urls=("https://github.com/lightly-ai/lightly/pull/1923",),
        check="lightly_sigreg.py",
        wrong=("lightly==1.5.23",),
        right=("lightly==1.5.24",),
        cause="gather_without_gradient",
    ),
    PublicBug(
        name="metric-learning-wrapper",
        says="the loss over all ranks' embeddings is not multiplied by the world size",
        urls=(
            "https://github.com/KevinMusgrave/pytorch-metric-learning/issues/363",
            "https://github.com/KevinMusgrave/pytorch-metric-learning/pull/364",
        ),
        check="metric_learning_wrapper.py",
        wrong=("pytorch-metric-learning==0.9.99",),
        right=("pytorch-metric-learning==1.0.0",),
        cause="gather_without_gradient",
    ),
)
"""The bugs that are seen: different with the wrong version, same with the right one."""

CANDIDATES: tuple[PublicBug, ...] = (
    PublicBug(
        name="lightly-barlow-twins",
        says="the correlations are summed over ranks by an all-reduce without a gradient",
        urls=(
            "https://github.com/lightly-ai/lightly/issues/1977",
            "https://github.com/lightly-ai/lightly/pull/1980",
        ),
        check="lightly_barlow_twins.py",
        wrong=("lightly==1.5.25",),
        right=("lightly==1.5.26",),
        cause="gather_without_gradient",
        why_open="the right version standardises each rank's rows by themselves, so it differs too",
    ),
)
"""Bugs that are not seen yet as they should be. They run only if ``--only`` names them."""
