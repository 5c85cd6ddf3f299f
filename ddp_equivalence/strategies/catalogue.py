"""The catalogue: every trial of the suite, chosen from what each strategy says of itself.

``tests/equivalence`` runs the trials on which a strategy keeps its promise, and
``tests/difference`` runs all others. Together they are the whole catalogue.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from ddp_equivalence.case.case import Case
from ddp_equivalence.case.errors import BadCase, one_of
from ddp_equivalence.case.layouts import parse
from ddp_equivalence.case.losses import LOSSES, CatalogueLoss
from ddp_equivalence.case.models import MODELS
from ddp_equivalence.case.models.model import CatalogueModel
from ddp_equivalence.strategies import STRATEGIES
from ddp_equivalence.strategies.sharded_batch import MICRO_BATCHES
from ddp_equivalence.strategies.strategy import Strategy
from ddp_equivalence.strategies.trial import Trial as Trial

LAYOUTS = ("1x1", "1x2", "1x4", "2x2", "4x1", "2x4", "1+3", "3+1", "2x2-round-robin")

SEVERAL_GPUS_LAYOUTS = ("1x2", "2x1")
"""The layouts for strategies whose ranks drive several GPUs each."""

EIGHT_GPUS = "1x8"
"""The layout of a machine with eight GPUs. Every strategy tries one case on it, so that each of
them drives all eight, but emulations of GPUs do not."""

ONE_PROCESS_LAYOUTS = ("1x2", "1x4")
"""The layouts for strategies that run in one process, and so on one node. "1x1" is not among them:
with a single replica, nn.DataParallel would only call the module."""

SHARDS = {
    "interleaved": ("1x2", "1+3"),
    "uneven": ("1x2", "1+3"),
    "one_example": ("1x2", "1+3"),
    # On two ranks, one rank would hold all data, and every rule would give the big batch.
    "empty": ("1x4", "1+3"),
    "no_valid_token": ("1x4", "1+3"),
}
"""Shards other than equal ones, and the layouts on which they are tried."""

CORE = (
    ("mlp", "mse_mean"),
    ("mlp", "mse_sum"),
    ("mlp", "two_normalisers"),
    ("gru_tied", "token_mean"),
)
"""Models and losses that are tried on every layout and with all shards. Other pairs are tried on
one layout."""

FEW_CORE = (("mlp", "contrastive"), ("gru_tied", "token_mean"))
"""The replacement of ``CORE`` for strategies that try few pairs."""

FEW_LOSSES = ("mse_mean", "token_mean")
"""The losses that strategies with few pairs try with other models: one for each kind of output."""

MODELS_TREATED_OTHERWISE = (
    *("mlp", "gru_tied", "frozen", "branch", "sparse_embedding", "batch_norm"),
)
"""Models with parameters that another way of computing may treat otherwise: shared ones, frozen
ones, unused ones, and those with sparse gradients; and one that couples examples."""

WITH_COUPLED_LOSSES = ("mlp", "conv")
"""Models that are tried with losses that couple examples."""

LOW_PRECISION = (
    ("mlp", "mse_mean", "equal"),
    ("mlp", "mse_sum", "equal"),
    ("conv", "cross_entropy_mean", "equal"),
    # With uneven shards, the error of a mean of means is larger than the rounding of bfloat16.
    ("attention_tied", "token_mean", "uneven"),
)
"""Models, losses and shards that are tried in float32 and bfloat16 as well."""

EXACT = (("linear_8", "mse_mean"), ("linear_8", "mse_sum"), ("mlp", "mse_sum"))
"""Models and losses that are tried with integer values, and compared bit for bit."""

EXACT_EXAMPLES_PER_RANK = 4
"""A power of two: with eight outputs, every division in a mean is exact."""


def world_sizes() -> tuple[int, ...]:
    """The numbers of ranks that the catalogue has layouts for."""
    return tuple(sorted({parse(layout).world_size for layout in (*LAYOUTS, EIGHT_GPUS)}))


def trials(strategy: str) -> tuple[Trial, ...]:
    """All trials of one strategy, by layout. Raises BadCase for an unknown strategy."""
    if strategy not in STRATEGIES:
        raise BadCase("strategy", strategy, one_of(STRATEGIES, strategy))
    chosen = dict.fromkeys(_chosen(STRATEGIES[strategy]))
    # Trials of one layout share their ranks, so in this order few ranks are alive at a time.
    order = (*LAYOUTS, *SEVERAL_GPUS_LAYOUTS, EIGHT_GPUS)
    return tuple(sorted(chosen, key=lambda trial: order.index(trial.case.layout)))


def go_together(model: CatalogueModel, loss: CatalogueLoss) -> bool:
    """True if the loss takes the model's outputs, and a difference can have only one cause."""
    if model.output != loss.output:
        return False
    if model.batch_coupled and not loss.plain_mean:
        return False  # Model and loss could both be the cause.
    # With find_unused_parameters, DDP raises an error ("marked ready twice") if the loss uses a
    # parameter that the forward pass left out.
    return not (model.unused_on_some_ranks and loss.uses_all_parameters)


def can_train(strategy: Strategy, model: CatalogueModel, loss: CatalogueLoss) -> bool:
    """True if the strategy can train the model with this loss, and both go together."""
    if strategy.shards_parameters and loss.uses_all_parameters:
        return False
    return strategy.takes(model) and go_together(model, loss)


def case_of(
    strategy: Strategy,
    model: str,
    loss: str,
    layout: str,
    shards: str = "equal",
    dtype: torch.dtype | None = None,
) -> Case:
    """The case on which the catalogue tries this strategy with this model and loss.

    If the strategy accumulates, its micro-batches are as large as the shards of other strategies.
    """
    dtype = dtype or strategy.dtype
    case = Case(model=model, loss=loss, layout=layout, shards=shards, dtype=dtype)
    if not strategy.accumulates or "+" in shards:
        return case
    examples = MICRO_BATCHES * case.catalogue_examples
    return Case(
        model=model, loss=loss, layout=layout, shards=shards, dtype=dtype, examples=examples
    )


def _chosen(strategy: Strategy) -> Iterator[Trial]:
    """The strategy's trials; some may come twice."""
    if strategy.gpus_per_rank > 1:
        yield from _on_several_gpus(strategy)
        return
    if strategy.has_the_rule_of or strategy.tries_few_cases:
        yield from _of_another_way(strategy)
        return
    core = FEW_CORE if strategy.tries_few_pairs else CORE
    yield from _with_every_pair(strategy)
    for model, loss in core:
        yield from _on_every_layout(strategy, model, loss)
        yield from _with_other_shards(strategy, model, loss)
        yield from _with_other_options(strategy, model, loss)
    if strategy.lane is not None or not strategy.one_process:
        yield Trial(case_of(strategy, *core[0], EIGHT_GPUS), strategy.name)
    yield from _in_low_precision(strategy)
    yield from _exact(strategy)
    if strategy.accumulates:
        yield from _with_a_shorter_last_window(strategy)
    for model, loss in core:
        for layout, shards in strategy.more_shards:
            yield Trial(case_of(strategy, model, loss, layout, shards), strategy.name)


def _on_several_gpus(strategy: Strategy) -> Iterator[Trial]:
    """Few trials, because the rules are those of other strategies.

    Batch norm is left out: each replica normalises with its part of a shard, which is no cause that
    the diagnosis knows.
    """
    for layout in SEVERAL_GPUS_LAYOUTS:
        for model, loss in (*CORE, ("mlp", "contrastive")):
            yield Trial(case_of(strategy, model, loss, layout), strategy.name)
    case = case_of(strategy, *CORE[0], SEVERAL_GPUS_LAYOUTS[0])
    yield Trial(case, strategy.name, steps=2)
    yield Trial(case, strategy.name, compare="update")


def _of_another_way(strategy: Strategy) -> Iterator[Trial]:
    """The rule is that of another strategy, so few trials show that this way of computing keeps it:
    with models that it may treat otherwise, where the rule is broken, and on other layouts.
    """
    mlp = ("mlp", "mse_mean")
    few, many = ("2x2", "2x4") if strategy.needs_several_nodes else ("1x2", EIGHT_GPUS)
    for name in MODELS_TREATED_OTHERWISE:
        loss = next(one for one in FEW_LOSSES if LOSSES[one].output == MODELS[name].output)
        if _is_tried(strategy, MODELS[name], LOSSES[loss]):
            layout = few if strategy.compiles else "2x2"
            yield _trial(strategy, case_of(strategy, name, loss, layout))
    for loss in ("mse_sum", "contrastive"):
        yield _trial(strategy, case_of(strategy, "mlp", loss, few))
    for layout in () if strategy.compiles else ("2x2-round-robin", many):
        yield _trial(strategy, case_of(strategy, *mlp, layout))
    for layout, shards in ((few, "uneven"), *strategy.more_shards):
        yield _trial(strategy, case_of(strategy, *mlp, layout, shards))
    # In bfloat16, the rounding of the weights hides how far a few steps move them.
    dtype = torch.float32 if strategy.trains else torch.bfloat16
    yield _trial(strategy, case_of(strategy, *mlp, few, dtype=dtype))
    yield Trial(case_of(strategy, *mlp, few), strategy.name, steps=2, compare="update")


def _trial(strategy: Strategy, case: Case) -> Trial:
    """The gradients of one step; or the weights after three steps, if the strategy trains. Where
    the first update is wrong, the others show nothing more.
    """
    if not strategy.trains:
        return Trial(case, strategy.name)
    trained = Trial(case, strategy.name, steps=3, compare="update")
    return trained if trained.cause is None else replace(trained, steps=1)


def _main_layout(strategy: Strategy) -> str:
    if strategy.lane is not None:
        return "1x2"  # This needs the fewest devices.
    return "1x4" if strategy.one_process else "2x2"


def _layouts(strategy: Strategy) -> tuple[str, ...]:
    return ONE_PROCESS_LAYOUTS if strategy.one_process else LAYOUTS


def _few_layouts(strategy: Strategy) -> tuple[str, ...]:
    return ("1x2",) if strategy.one_process or strategy.tries_few_pairs else ("1x2", "2x2")


def _with_every_pair(strategy: Strategy) -> Iterator[Trial]:
    for model in MODELS.values():
        for loss in LOSSES.values():
            if not _is_tried(strategy, model, loss):
                continue
            main = case_of(strategy, model.name, loss.name, _main_layout(strategy))
            yield Trial(main, strategy.name)
            if model.batch_coupled and "1x1" in _layouts(strategy) and not strategy.accumulates:
                # A single rank has the whole batch, so that nothing differs.
                yield Trial(case_of(strategy, model.name, loss.name, "1x1"), strategy.name)


def _is_tried(strategy: Strategy, model: CatalogueModel, loss: CatalogueLoss) -> bool:
    if model.only_exact or not can_train(strategy, model, loss):
        return False
    if model.draws_random_numbers and strategy.runs_forward_in_turn:
        return False  # The model may happen to draw the same masks as in the big batch.
    if loss.batch_coupled:
        return model.name in WITH_COUPLED_LOSSES
    in_core = model.name in [name for name, _ in FEW_CORE]
    return not strategy.tries_few_pairs or in_core or loss.name in FEW_LOSSES


def _on_every_layout(strategy: Strategy, model: str, loss: str) -> Iterator[Trial]:
    for layout in _layouts(strategy):
        yield Trial(case_of(strategy, model, loss, layout), strategy.name)


def _with_other_shards(strategy: Strategy, model: str, loss: str) -> Iterator[Trial]:
    if strategy.splits_the_batch_itself:
        return
    for shards, layouts in SHARDS.items():
        if shards == "no_valid_token" and LOSSES[loss].output != "tokens":
            continue
        for layout in (_main_layout(strategy),) if strategy.one_process else layouts:
            yield Trial(case_of(strategy, model, loss, layout, shards), strategy.name)


def _with_other_options(strategy: Strategy, model: str, loss: str) -> Iterator[Trial]:
    """Two steps, updates in place of gradients, and gloo with CUDA tensors."""
    for layout in _few_layouts(strategy):
        case = case_of(strategy, model, loss, layout)
        yield Trial(case, strategy.name, steps=2)
        yield Trial(case, strategy.name, compare="update")
        if Trial(case, strategy.name, steps=2).cause is None:
            # Where the first update is wrong, the second shows nothing more.
            yield Trial(case, strategy.name, steps=2, compare="update")
        if not strategy.one_process:
            yield Trial(case, strategy.name, backend="gloo_cuda")


def _in_low_precision(strategy: Strategy) -> Iterator[Trial]:
    for model, loss, shards in LOW_PRECISION:
        if shards != "equal" and strategy.splits_the_batch_itself:
            continue
        for dtype in (torch.float32, torch.bfloat16):
            for layout in _few_layouts(strategy):
                case = case_of(strategy, model, loss, layout, shards, dtype)
                yield Trial(case, strategy.name)


def _exact(strategy: Strategy) -> Iterator[Trial]:
    if strategy.accumulates:
        return  # The mean over three micro-batches is not exact.
    for layout in _few_layouts(strategy):
        for model, loss in EXACT:
            for dtype in (torch.float64, torch.float32):
                world_size = case_of(strategy, model, loss, layout).ranks.world_size
                case = Case(
                    model=model,
                    loss=loss,
                    layout=layout,
                    dtype=dtype,
                    examples=EXACT_EXAMPLES_PER_RANK * world_size,
                    exact=True,
                )
                yield Trial(case, strategy.name)


def _with_a_shorter_last_window(strategy: Strategy) -> Iterator[Trial]:
    """Two steps, of which the second has one micro-batch less."""
    for model, loss in CORE:
        for layout in ("1x2", "2x2"):
            case = case_of(strategy, model, loss, layout)
            window = case.catalogue_examples
            shorter = window // MICRO_BATCHES * (MICRO_BATCHES - 1)
            yield Trial(case, strategy.name, steps=(window, shorter))
