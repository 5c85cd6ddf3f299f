"""Every case of the suite: what is compared with one big batch, by which strategy.

``tests/equivalence`` takes ``trials(strategy)`` that keep the promise, ``tests/difference`` the
others; the two together are the whole catalogue.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from ddp_equivalence.case.case import Case
from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.case.losses import LOSSES, CatalogueLoss
from ddp_equivalence.case.models import MODELS
from ddp_equivalence.case.models.model import CatalogueModel
from ddp_equivalence.case.steps import Compare, Steps
from ddp_equivalence.strategies import STRATEGIES
from ddp_equivalence.strategies.sharded_batch import MICRO_BATCHES, facts_of
from ddp_equivalence.strategies.strategy import Strategy

LAYOUTS = ("1x1", "1x2", "1x4", "2x2", "4x1", "2x4", "1+3", "3+1", "2x2-round-robin")
SHARDS = {
    "interleaved": ("1x2", "1+3"),
    "uneven": ("1x2", "1+3"),
    "one_example": ("1x2", "1+3"),
    # On two ranks all data would be on one, and every rule the big batch.
    "empty": ("1x4", "1+3"),
    "no_valid_token": ("1x4", "1+3"),
}
"""Every deal of examples, and where it is met."""

CORE = (
    ("mlp", "mse_mean"),
    ("mlp", "mse_sum"),
    ("mlp", "two_normalisers"),
    ("gru_tied", "token_mean"),
)
"""Met on every layout and every deal of examples; all other pairs on one layout."""

GATHERED_CORE = (("mlp", "contrastive"), ("gru_tied", "token_mean"))
"""The same for ``ddp_gathered``: its rule knows nothing of the loss, which two can show."""

WITH_COUPLED_LOSSES = ("mlp", "conv")
"""Models met with losses that couple examples."""

PRECISE = (
    ("mlp", "mse_mean", "equal"),
    ("mlp", "mse_sum", "equal"),
    ("conv", "cross_entropy_mean", "equal"),
    # Uneven, so that a mean of means stands above the rounding of bfloat16.
    ("attention_tied", "token_mean", "uneven"),
)
"""Met in float32 and bfloat16 as well."""

EXACT_EXAMPLES_PER_RANK = 4
"""A power of two: with eight outputs every division in a mean is exact."""


@dataclass(frozen=True)
class Trial:
    """One case, met by one strategy. ``cause``: the name of its known difference, None if the
    strategy promises the big batch here. ``str()`` is its test id.
    """

    case: Case
    strategy: str
    steps: Steps = 1
    compare: Compare = "gradients"
    backend: str | None = None

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of ``check`` for this trial; ``backend`` None is the run's own."""
        return {"compare": self.compare, "steps": self.steps, "backend": self.backend}

    @property
    def cause(self) -> str | None:
        return _cause(self)

    def __str__(self) -> str:
        case = self.case
        parts = [case.model, case.loss, case.layout, case.shards, case.dtype_name]
        if self.steps != 1:
            steps = self.steps if isinstance(self.steps, int) else len(self.steps)
            parts.append(f"{steps}steps")
            if isinstance(self.steps, tuple):
                parts.append("shorter-last")
        if self.compare == "update":
            parts.append("update")
        return "-".join(map(str, parts))


def trials(strategy: str) -> tuple[Trial, ...]:
    """All trials of one strategy, by layout. Raises BadCase for an unknown one."""
    if strategy not in STRATEGIES:
        raise BadCase("strategy", strategy, f"one of {', '.join(STRATEGIES)}")
    found = dict.fromkeys(_select(STRATEGIES[strategy]))
    # In the order of layouts, so that few sets of ranks are alive at a time.
    return tuple(sorted(found, key=lambda trial: LAYOUTS.index(trial.case.layout)))


def cases(promise_of: str) -> tuple[Trial, ...]:
    """The trials on which the strategy promises the gradient of one big batch."""
    return tuple(trial for trial in trials(promise_of) if trial.cause is None)


def known_differences(of: str) -> tuple[Trial, ...]:
    """The complement: the trials on which it is known to differ, each with its cause."""
    return tuple(trial for trial in trials(of) if trial.cause is not None)


@cache
def _cause(trial: Trial) -> str | None:
    breaks = STRATEGIES[trial.strategy].breaks
    return next(filter(None, map(breaks, facts_of(trial.case, trial.steps))), None)


def _select(strategy: Strategy) -> Iterator[Trial]:
    name = strategy.name
    main = "1x4" if strategy.one_process else "2x2"
    if strategy.lane is not None:
        main = "1x2"  # as few devices as it takes
    layouts = [layout for layout in LAYOUTS if _fits(strategy, layout)]
    gathered = strategy.name == "ddp_gathered"
    core = GATHERED_CORE if gathered else CORE
    small = ("1x2",) if strategy.one_process or gathered else ("1x2", "2x2")
    for model, loss in _pairs(strategy):
        yield Trial(case_of(strategy, model, loss, main), name)
        if MODELS[model].batch_coupled and "1x1" in layouts and name != "ddp_accumulation":
            yield Trial(case_of(strategy, model, loss, "1x1"), name)  # alone there is no difference
    for model, loss in core:
        for layout in layouts:
            yield Trial(case_of(strategy, model, loss, layout), name)
        # The real nn.DataParallel deals the examples itself.
        for shards, dealt in SHARDS.items() if strategy.lane is None else ():
            if shards == "no_valid_token" and LOSSES[loss].output != "tokens":
                continue
            for layout in (main,) if strategy.one_process else dealt:
                yield Trial(case_of(strategy, model, loss, layout, shards), name)
        for layout in small:
            case = case_of(strategy, model, loss, layout)
            yield Trial(case, name, steps=2)
            yield Trial(case, name, compare="update")
            if Trial(case, name, steps=2).cause is None:
                # Where the first update is wrong, the second shows nothing more.
                yield Trial(case, name, steps=2, compare="update")
            if not strategy.one_process:
                yield Trial(case, name, backend="gloo_cuda")
    for model, loss, shards in PRECISE:
        if shards != "equal" and strategy.lane is not None:
            continue
        for dtype in (torch.float32, torch.bfloat16):
            for layout in small:
                yield Trial(case_of(strategy, model, loss, layout, shards, dtype), name)
    for layout in small:
        yield from _exact(strategy, layout)
    yield from _only_here(strategy)


def _pairs(strategy: Strategy) -> Iterator[tuple[str, str]]:
    """Every model with every loss that fits it."""
    for model in MODELS.values():
        in_turn = strategy.one_process or strategy.name == "ddp_accumulation"
        if model.name == "dropout" and in_turn:
            continue  # what draws in turn from one generator may meet the big batch's mask
        for loss in LOSSES.values():
            # What couples examples is met with two plain means, so that one thing differs.
            plain = not model.batch_coupled or loss.name in ("mse_mean", "cross_entropy_mean")
            if loss.batch_coupled and model.name not in WITH_COUPLED_LOSSES:
                continue
            if strategy.name == "ddp_gathered" and _says_nothing_new(model, loss):
                continue
            # DDP that looks for unused parameters refuses one that only a penalty uses: it is
            # marked ready twice.
            refused = model.unused_on_some_ranks and loss.name.endswith("l2_penalty")
            if refused or model.name == "linear_8":
                continue
            if model.output == loss.output and plain:
                yield model.name, loss.name


def _says_nothing_new(model: CatalogueModel, loss: CatalogueLoss) -> bool:
    """True if other pairs show the same of a rule that does not look into the loss."""
    few = model.name not in [name for name, _ in GATHERED_CORE] and not loss.batch_coupled
    return few and loss.name not in ("mse_mean", "token_mean")


def _exact(strategy: Strategy, layout: str) -> Iterator[Trial]:
    """Integer-valued data, compared bit for bit."""
    if strategy.name == "ddp_accumulation":
        return  # three micro-batches divide nothing exactly
    for model, loss in (("linear_8", "mse_mean"), ("linear_8", "mse_sum"), ("mlp", "mse_sum")):
        for dtype in (torch.float64, torch.float32):
            case = case_of(strategy, model, loss, layout, dtype=dtype)
            examples = EXACT_EXAMPLES_PER_RANK * case.ranks.world_size
            yield Trial(
                Case(
                    model=model,
                    loss=loss,
                    layout=layout,
                    dtype=dtype,
                    examples=examples,
                    exact=True,
                ),
                strategy.name,
            )


def _only_here(strategy: Strategy) -> Iterator[Trial]:
    """What only one strategy has: a shorter last window, nodes of equal weight on 1+3."""
    if strategy.name == "ddp_accumulation":
        for model, loss in CORE:
            for layout in ("1x2", "2x2"):
                case = case_of(strategy, model, loss, layout)
                window = case.catalogue_examples
                shorter = window // MICRO_BATCHES * (MICRO_BATCHES - 1)
                yield Trial(case, strategy.name, steps=(window, shorter))
    if strategy.name == "hybrid":
        for model, loss in CORE:
            yield Trial(case_of(strategy, model, loss, "1+3", "9+3+3+3"), strategy.name)
            yield Trial(case_of(strategy, model, loss, "3+1", "3+3+3+9"), strategy.name)


def case_of(
    strategy: Strategy,
    model: str,
    loss: str,
    layout: str,
    shards: str = "equal",
    dtype: torch.dtype = torch.float64,
) -> Case:
    """The catalogue's case of this strategy: micro-batches take more examples."""
    case = Case(model=model, loss=loss, layout=layout, shards=shards, dtype=dtype)
    if strategy.name != "ddp_accumulation" or "+" in shards:
        return case
    # Five rows for each of three micro-batches.
    examples = MICRO_BATCHES * case.catalogue_examples
    return Case(
        model=model, loss=loss, layout=layout, shards=shards, dtype=dtype, examples=examples
    )


def _fits(strategy: Strategy, layout: str) -> bool:
    if not strategy.one_process:
        return True
    # One process has one node, and with one replica the module is just called.
    return layout in ("1x2", "1x4")
