"""Adam: what it hides, what it does not, and how to scale its learning rate.

The step of Adam is the mean of the gradients divided by the root of the mean of their squares, so a
constant factor on the gradient cancels, except for eps. "Differ by" is the largest distance between
the weights and those of the big batch after any of ten steps, relative to the distance that the big
batch went. 0 is less than 1e-12, which is rounding in float64. There are four processes with 4
examples each, under DistributedDataParallel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from math import isclose

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from ddp_equivalence.comparison.digits import text_of
from ddp_equivalence.ranks.warm_ranks import on_ranks
from tests.claims.claim import Change, Table, claim
from tests.claims.toy import Toy, four_processes, one_process
from tests.claims.trajectory import Training, big_batch, differ_by, on_a_rank


def summed_and_averaged(training: Training) -> tuple[float, float]:
    """How far the weights differ from the big batch's: with summed and with averaged gradients."""
    expected = big_batch(training)
    averaged = on_ranks("2x2", on_a_rank, training)[-1]
    summed = on_ranks("2x2", on_a_rank, replace(training, loss_times=4.0))[-1]
    return differ_by(summed, expected), differ_by(averaged, expected)


def sgd(weights: Iterator[nn.Parameter], lr: float, eps: float) -> Optimizer:
    """SGD in place of Adam."""
    return SGD(weights, lr=lr)


@claim(
    "false",
    optimizer=Adam,
    fails_when=Change("the optimizer is SGD", optimizer=sgd),
)
def test_adam_hides_a_constant_factor(table: Table, optimizer: Callable[..., Optimizer]) -> None:
    """It trains fine with Adam, just like on one process, so the gradients are averaged properly.

    Adam divides the factor away where gradients are much larger than eps: with gradients that are
    added up the weights are the same within 1e-6 in the test. Compare gradients, or the update of
    plain SGD.

    Gradients that are added up over four processes are four times too large, and Adam divides the
    factor away: the weights are the same except for the effect of eps, which shrinks in proportion
    to eps. With SGD the same gradients make steps that are four times too long. So a run with Adam
    does not show whether gradients are summed or averaged. Compare the gradients, or the update of
    plain SGD.
    """
    summed = {}
    for eps in (1e-4, 1e-6, 1e-8):
        summed[eps], averaged = summed_and_averaged(Training(partial(optimizer, lr=0.05, eps=eps)))
        assert averaged < 1e-12
        table.add_row(
            optimizer=f"Adam, eps {eps:g}",
            averaged_gradients_differ_by=averaged,
            added_up_gradients_differ_by=summed[eps],
        )
    under_sgd, averaged = summed_and_averaged(Training(partial(SGD, lr=0.05)))
    table.add_row(
        optimizer="SGD",
        averaged_gradients_differ_by=averaged,
        added_up_gradients_differ_by=under_sgd,
    )
    assert summed[1e-8] < 1e-6
    assert isclose(summed[1e-6], 100 * summed[1e-8], rel_tol=0.05)
    assert under_sgd > 0.5


VISIBLE = {
    "weight decay 0.1 of Adam (L2, in the gradient)": Training(
        partial(Adam, lr=0.05, weight_decay=0.1)
    ),
    "clipping to 4, which only some of the averaged gradients exceed": Training(
        partial(Adam, lr=0.05), clip="after", max_norm=4.0
    ),
}
HIDDEN = {
    "nothing else": Training(partial(Adam, lr=0.05)),
    "weight decay 0.1 of AdamW (not in the gradient)": Training(
        partial(AdamW, lr=0.05, weight_decay=0.1)
    ),
    "clipping to 0.5, which all exceed": Training(
        partial(Adam, lr=0.05), clip="after", max_norm=0.5
    ),
}


@claim(
    "false",
    visible=VISIBLE,
    fails_when=Change(
        "the weight decay and the clipping are those that hide the factor", visible=HIDDEN
    ),
)
def test_adam_does_not_hide_everything(table: Table, visible: dict[str, Training]) -> None:
    """Adam makes up for any mistake in the reduction, as it scales every gradient anyway.

    It hides a positive factor on a weight's gradient that is the same in all steps, even another
    for each weight. Beside Adam's own weight decay (not AdamW's), and where clipping takes effect
    in some steps, a factor shows. So does a direction that is wrong by another part in every step,
    as with uneven shards.

    The factor shows beside a term without it. Adam's own weight decay is added to the gradient, and
    beside a gradient that is four times too large it counts a quarter as much. Clipping that takes
    effect in some steps only makes the factor different in every step. AdamW's weight decay, and
    clipping that takes effect in every step, hide the factor. The last row has uneven shards whose
    means count equally.
    """
    for shown, trainings in (("yes", visible), ("no", HIDDEN)):
        for name, training in trainings.items():
            summed, averaged = summed_and_averaged(training)
            assert averaged < 1e-12
            assert (summed > 0.01) == (shown == "yes")
            table.add_row(
                Adam_with=name, mistake="gradients added up", differ_by=summed, shows=shown
            )
    uneven = Training(partial(Adam, lr=0.05), shards=(13, 1, 1, 1))
    off = differ_by(on_ranks("2x2", on_a_rank, uneven)[-1], big_batch(uneven))
    assert off > 0.01
    table.add_row(
        Adam_with="nothing else", mistake="shards 13+1+1+1 averaged", differ_by=off, shows="yes"
    )


def constant(step: int) -> Tensor:
    """The same gradient in every step."""
    return torch.ones(WEIGHTS, dtype=torch.double)


def noise(step: int) -> Tensor:
    """Normal noise without a direction."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(WEIGHTS, generator=generator, dtype=torch.double)


def rare(step: int) -> Tensor:
    """A gradient in the last step only."""
    return torch.full((WEIGHTS,), float(step == STEPS - 1), dtype=torch.double)


def smaller(step: int) -> Tensor:
    """The same gradient in every step, but a thousandth of it in the last 1,000."""
    return constant(step) * (1.0 if step < STEPS - 1000 else 0.001)


WEIGHTS, STEPS = 1000, 3000

GRADIENTS = {
    "the same in every step": (constant, 1.0),
    "noise only": (noise, 0.18),
    "one after 2,999 zeros": (rare, 3.08),
    "1,000 of a thousandth, after 2,000": (smaller, 0.00173),
}


@claim(
    "true when the gradient has hardly changed since the first step, and is much larger than eps",
    gradients=GRADIENTS,
    fails_when=Change(
        "every gradient is the same in every step",
        gradients={name: (constant, length) for name, (_, length) in GRADIENTS.items()},
    ),
)
def test_adams_step_is_not_always_as_long_as_the_learning_rate(
    table: Table, gradients: dict[str, tuple[Callable[[int], Tensor], float]]
) -> None:
    """A step of Adam is as long as the learning rate, whatever the gradient.

    The step of a weight is the mean of its gradients by the root of the mean of their squares.
    Noise cancels in the first and not in the second: 0.18 of the rate. One gradient after 2,999
    zeros enters them with a tenth and a thousandth: 3.08 times the rate. If gradients were 1,000
    times as large until 1,000 steps ago: 0.0017. Only a constant factor cancels.

    The length is the mean of the last step's over 1,000 weights, relative to the learning rate.
    """
    for name, (gradient_of, expected) in gradients.items():
        for size in (1.0, 1000.0):
            weights = nn.Parameter(torch.zeros(WEIGHTS, dtype=torch.double))
            optimizer = Adam([weights], lr=0.01)
            for step in range(STEPS):
                before = weights.detach().clone()
                weights.grad = size * gradient_of(step)
                optimizer.step()
            length = float((weights.detach() - before).abs().mean()) / 0.01
            assert isclose(length, expected, rel_tol=0.03)
            table.add_row(gradient=name, size=size, length_of_the_step=f"{length:.3g} x rate")


CLEAN = Toy(16, 1e-3, optimizer=Adam)
NOISY = Toy(4, 1e-4, noise=1.0, experiments=200, examples=800, begin=0.05, optimizer=Adam)


@claim(
    "true when the gradient is much larger than the noise of a batch, and hardly changes over the "
    "training",
    with_noise=2.0,
    fails_when=Change("the learning rate is multiplied by four with noise, too", with_noise=4.0),
)
def test_linear_scaling_with_adam(table: Table, with_noise: float) -> None:
    """With Adam the learning rate is multiplied by effective batch / base batch, as with SGD.

    Every step is then as long as the learning rate, so a quarter of the steps needs four times the
    rate. If noise dominates, Adam divides by the noise, which is
    half as large at four times the batch: the square root arrives at the same place, four times the
    rate goes nearly twice as far.

    This is the neuron y = w x of the section above with 16 examples per process. The noisy one has
    4 examples per process and begins close to its optimum, at w = 0.05, where the gradient of one
    example is 0.08 and its noise 1.4; the figures are the mean of 200 experiments. The rule of
    Malladi et al., arXiv 2205.10287, also changes betas and eps; here they keep their defaults.
    """
    ways = {}
    for name, toy in (("none", CLEAN), ("standard normal", NOISY)):
        one = one_process(toy)
        runs = {1.0: one} | {k: four_processes(replace(toy, lr=k * toy.lr)) for k in (2.0, 4.0)}
        for factor, course in runs.items():
            ways[name, factor] = (toy.begin - course.weight) / (toy.begin - one.weight)
            table.add_row(
                noise=name,
                effective_batch=toy.batch_size * (1 if factor == 1 else 4),
                lr=f"{factor * toy.lr:g}" + ("" if factor == 1 else f" ({factor:g} times)"),
                steps=course.steps,
                w_after_the_epoch=course.weight,
                distance_compared_with_one_process=f"{text_of(ways[name, factor], '.3g')} times",
            )
    assert isclose(ways["none", 4.0], 1, rel_tol=1e-6)
    assert isclose(ways["none", 2.0], 0.5, rel_tol=1e-6)
    assert isclose(ways["standard normal", with_noise], 1, rel_tol=0.05)
    assert 1.8 < ways["standard normal", 4.0] < 2
