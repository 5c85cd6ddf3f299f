"""The gradient that a setup leaves on every rank, as a multiple of the big batch's."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from ddp_equivalence.commands.explain.epochs import Epoch, epoch_of
from ddp_equivalence.commands.explain.learning_rates import LearningRates, learning_rates_of
from ddp_equivalence.commands.explain.setup import Setup


@dataclass(frozen=True)
class Divisor:
    """Something that divides, and by what. ``number``: None where it is not the same everywhere."""

    what: str
    number: int | None


@dataclass(frozen=True)
class Explanation:
    """What a setup computes; ``str()`` is the text. Nothing is rounded but square roots.

    Let g be the gradient of the mean loss over the ``effective_batch`` examples of one step.
    ``divisors``: what divides the summed loss, in the order in which it does. ``factor``: every
    rank holds factor x g; where ``is_multiple`` is False, the examples (tokens) count unequally,
    and it is what they count on average. ``mended_factor``: the same after the mend that the
    text names, which leaves accumulation as it is unless tokens are counted over all of it; where
    there is nothing to mend, ``factor``. ``shares``: (examples, how often each counts) of the
    losses in one micro-batch, where the sizes alone make them unequal. ``learning_rates``: for
    a gradient of ``mended_factor`` x g; None without a known good one. ``epoch``: None without the
    dataset's size.
    """

    setup: Setup
    effective_batch: int
    divisors: tuple[Divisor, ...]
    factor: Fraction
    is_multiple: bool
    mended_factor: Fraction
    shares: tuple[tuple[int, Fraction], ...]
    learning_rates: LearningRates | None
    epoch: Epoch | None

    def __str__(self) -> str:
        from ddp_equivalence.commands.explain.text import render

        return render(self)


def explain(setup: Setup) -> Explanation:
    """Work out what the setup computes. Never raises: what cannot be is refused by ``Setup``."""
    weights = example_weights(setup)
    batch = setup.effective_batch
    factor = batch * sum(
        (size * weight for size, weight in zip(setup.loss_sizes, weights, strict=True)), Fraction(0)
    )
    factor /= setup.batch
    uneven = len(set(weights)) > 1
    losses = len(setup.loss_sizes) * setup.accumulation * setup.processes
    is_multiple = not uneven and not (setup.loss == "token-mean" and losses > 1)
    # One count over all tokens divides by everything; another split divides what it did before.
    mended = factor if is_multiple or setup.loss != "token-mean" else Fraction(1)
    return Explanation(
        setup=setup,
        effective_batch=batch,
        divisors=_divisors(setup),
        factor=factor,
        is_multiple=is_multiple,
        mended_factor=mended,
        shares=tuple(
            (size, batch * weight) for size, weight in zip(setup.loss_sizes, weights, strict=True)
        )
        if uneven
        else (),
        learning_rates=learning_rates_of(setup, mended),
        epoch=epoch_of(setup),
    )


def example_weights(setup: Setup) -> list[Fraction]:
    """By what an example's own gradient is multiplied, in each loss of one micro-batch.

    A mean over tokens is taken to have as many in every example.
    """
    accumulated = setup.accumulation if setup.accumulation_divided else 1
    after = len(setup.loss_sizes) * accumulated * framework_divisor(setup)
    by_loss = [1 if setup.loss == "sum" else size for size in setup.loss_sizes]
    return [Fraction(1, divided * after) for divided in by_loss]


def framework_divisor(setup: Setup) -> int:
    """By what the gradients of all processes are divided when they are put together."""
    return setup.processes if setup.parallelism in ("ddp", "hybrid") else 1


def _divisors(setup: Setup) -> tuple[Divisor, ...]:
    inside = setup.parallelism == "data-parallel-loss-inside"
    sizes, found = setup.loss_sizes, []
    whose = _whose_loss(setup)
    if setup.loss == "token-mean":
        found.append(Divisor(f"{whose}, a mean over its own tokens, by their number", None))
    elif setup.loss == "sum":
        found.append(Divisor(f"{whose}, a sum, by nothing", 1))
    elif len(set(sizes)) > 1:
        found.append(Divisor(f"{whose}, a mean, by its {_either(sizes)} examples", None))
    else:
        found.append(Divisor(f"{whose}, a mean, by its {sizes[0]}", sizes[0]))
    if inside:
        found.append(
            Divisor(f"the mean over the replicas' losses by their {len(sizes)}", len(sizes))
        )
    if setup.accumulation > 1:
        number = setup.accumulation if setup.accumulation_divided else 1
        by = str(number) if setup.accumulation_divided else "nothing"
        found.append(Divisor(f"accumulation by {by}", number))
    if setup.processes > 1:
        number = framework_divisor(setup)
        what = "your own all_reduce by nothing" if number == 1 else f"DDP's average by {number}"
        found.append(Divisor(what, number))
    return tuple(found)


def _whose_loss(setup: Setup) -> str:
    if setup.parallelism == "data-parallel-loss-inside":
        return "each replica's loss"
    if setup.parallelism == "hybrid" and setup.processes > 1:
        return "each process's loss"
    return "each rank's loss" if setup.processes > 1 else "the loss"


def _either(sizes: tuple[int, ...]) -> str:
    return " or ".join(str(size) for size in sorted(set(sizes), reverse=True))
