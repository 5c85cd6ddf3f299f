"""The random numbers that the big batch draws by itself."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

from ddp_equivalence.case.batch import take
from ddp_equivalence.case.build import build_model
from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.diagnosis.draw_table import Draws, joined_draws
from ddp_equivalence.diagnosis.setting import Setting
from ddp_equivalence.faults.plant import without_planted_faults
from ddp_equivalence.measurement.random_draws import DrawLog
from ddp_equivalence.reference import in_dtype, train


@dataclass(frozen=True)
class ReferenceDraws:
    """``axes``: for each draw, the dimension along which examples stand; None if it is drawn once
    for all examples. ``axes`` itself is None if other numbers cannot be given to the big batch.
    """

    draws: tuple[Draws, ...]
    axes: tuple[int | None, ...] | None


def draws_of_the_big_batch(setting: Setting) -> ReferenceDraws | None:
    """What the reference draws; None if it draws nothing, or more than is recorded.

    A part of the batch shows which dimensions belong to the examples.
    """
    count = setting.example_count
    draws = _drawn(setting, count)
    if not draws:
        return None
    some = count // 2
    of_some = _drawn(setting, some) if some else draws
    return ReferenceDraws(draws, _axes(draws, of_some, count, some))


def _axes(
    draws: tuple[Draws, ...], of_some: tuple[Draws, ...], count: int, some: int
) -> tuple[int | None, ...] | None:
    if [one.name for one in draws] != [one.name for one in of_some]:
        return None
    axes: list[int | None] = []
    for whole, part in zip(draws, of_some, strict=True):
        big, small = whole.values.shape, part.values.shape
        differing = [axis for axis, size in enumerate(big) if small[axis : axis + 1] != (size,)]
        if len(big) != len(small) or len(differing) > 1:
            return None
        axis = differing[0] if differing else None
        if axis is not None and (big[axis] % count or big[axis] * some != small[axis] * count):
            return None
        axes.append(axis)
    return tuple(axes)


def _drawn(setting: Setting, examples: int) -> tuple[Draws, ...]:
    """What is drawn for the first of the examples."""
    log = DrawLog()
    case = setting.case
    batch = take(setting.batch, tuple(range(examples)), case.batch_dims)
    with without_planted_faults(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # half of the batch may be too few for the loss
        model = build_model(case).to(setting.computed_in)
        try:
            with log.watching():
                batch = in_dtype(batch, setting.computed_in)
                train(case, model, [batch], "gradients", setting.training)
        except BadCase:
            return ()
    return tuple(joined_draws(log.draws) or ()) if log.complete else ()
