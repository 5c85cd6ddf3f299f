"""Scaling the learning rate with the effective batch.

One neuron y = w x, which starts at w = 1, is trained with SGD for one epoch of 256 examples: on one
process with batches of 16, and on four processes with 16 each (DistributedDataParallel), so that
the effective batch is 64. Inputs are 1 and targets 0. The noisy runs are 2,000 independent
experiments with standard normal noise on every input and target. A closed form is the value that
theory predicts.

`python benchmarks/sandbox_plots.py docs` draws the same problem with the published settings: the
weight over an epoch, and the variance of its steps against the batch size. The lines are the closed
form.

![The weight over an epoch, without and with noise](weight.svg)

![The variance of the update steps against the effective batch size](variance.svg)
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import isclose

from torch.optim import SGD

from ddp_equivalence.comparison.digits import text_of
from tests.claims.claim import Change, Table, claim
from tests.claims.toy import Toy, four_processes, one_process

MEAN, VARIANCE = 0.9599, 1.0786
"""Mean and variance of the gradient of one noisy example, sign(w x - y) x, near w = 1."""

NOISY = 2000
"""The number of experiments with noise."""


def factor_of_momentum(steps: int, momentum: float = 0.9) -> float:
    """How far these steps go, in steps of plain SGD, if the gradient is constant."""
    return sum((1 - momentum ** (step + 1)) / (1 - momentum) for step in range(steps))


def beside(measured: float, closed_form: float) -> str:
    """The text of a cell with both figures."""
    return f"{text_of(measured, '.4g')} (closed form {text_of(closed_form, '.4g')})"


@claim(
    "true with plain SGD when the gradient hardly changes over the training; momentum may be added "
    "if the training is much longer than 4 / (1 - momentum) steps of the small batch",
    factor=4.0,
    fails_when=Change("the learning rate is not changed", factor=1.0),
)
def test_linear_scaling_reaches_the_same_weight(table: Table, factor: float) -> None:
    """With four times the effective batch, multiply the learning rate by four.

    An epoch has a quarter of the steps, so each has to go four times as far. Unchanged, the rate
    leads a quarter of the way. Momentum 0.9 needs ten steps to reach its speed: from w = 1, 16
    steps arrive at 0.9133 and 4 steps at 0.9638. With 800 and 200 steps the two ways are 3 % apart.

    With a constant gradient (L1 loss, no noise) this is exact: steps x learning rate is the same,
    0.0160. With noise it holds on average; near w = 1 the mean gradient is 0.9599 (closed form: 1 -
    steps x learning rate x gradient).
    """
    for noise, experiments in ((0.0, 1), (1.0, NOISY)):
        small = Toy(16, 1e-3, noise=noise, experiments=experiments)
        large = Toy(16, factor * 1e-3, noise=noise, experiments=experiments)
        unscaled = Toy(16, 1e-3, noise=noise, experiments=experiments)
        mean = MEAN if noise else 1.0
        one, four, left = one_process(small), four_processes(large), four_processes(unscaled)
        assert isclose(1 - one.weight, 1 - four.weight, rel_tol=1e-3 if noise else 1e-12)
        assert isclose(1 - four.weight, 16e-3 * mean, rel_tol=1e-2 if noise else 1e-12)
        assert isclose(1 - left.weight, 4e-3 * mean, rel_tol=1e-2 if noise else 1e-12)
        for processes, toy, course in ((1, small, one), (4, large, four), (4, unscaled, left)):
            table.add_row(
                noise="standard normal" if noise else "none",
                processes=processes,
                effective_batch=16 * processes,
                lr=toy.lr,
                steps=course.steps,
                w_after_the_epoch=course.weight,
                closed_form=1 - course.steps * toy.lr * mean,
            )
    momentum = partial(SGD, momentum=0.9)
    for examples, lr, most, least in ((256, 1e-3, 0.5, 0.3), (12_800, 1e-5, 1.0, 0.96)):
        small = Toy(16, lr, examples=examples, optimizer=momentum)
        large = replace(small, lr=factor * lr)
        ways = []
        for processes, toy, course in (
            (1, small, one_process(small)),
            (4, large, four_processes(large)),
        ):
            ways.append(1 - course.weight)
            table.add_row(
                noise="none, momentum 0.9",
                processes=processes,
                effective_batch=16 * processes,
                lr=toy.lr,
                steps=course.steps,
                w_after_the_epoch=course.weight,
                closed_form=1 - toy.lr * factor_of_momentum(course.steps),
            )
        assert least < ways[1] / ways[0] < most


@claim(
    "true with plain SGD on a quadratic loss that is the same in every batch, when 1.5 x steps x "
    "(learning rate x largest absolute curvature)^2 is small for the small batch",
    factor=4.0,
    fails_when=Change("the learning rate is multiplied by the square root of four", factor=2.0),
)
def test_linear_scaling_is_approximate_where_the_gradient_changes(
    table: Table, factor: float
) -> None:
    """Linear scaling gives the same training as the small batch.

    If the loss is half the square of w, four small steps lead to (1 - lr)^4 of w, and one of four
    times the rate to 1 - 4 lr. After n small steps the two are about 1.5 n lr^2 of what is left of
    w apart. With lr between 0.5 and 2 only the large batch diverges. On other losses the two may
    end in different minima.

    Here the loss is half the square, so the gradient is w itself and changes on the way; each
    process has batches of 4. Four small steps lead to (1 - lr)^4 of w, and one step with four times
    the learning rate leads to 1 - 4 lr of w. After n small steps the two are 1.5 n lr^2 of w apart,
    to first order. With a tenth of the learning rate the distance after as many steps is a
    hundredth. With momentum (0.9 in the last row) the two are farther apart. If only the larger
    learning rate is too large for the curvature (4 lr > 2 here), the
    large batch diverges while the small one converges.
    """
    apart = {}
    for lr in (0.001, 0.01, 0.1, 0.6):
        toy = Toy(4, lr, squared=True)
        one = one_process(toy)
        four = four_processes(Toy(4, factor * lr, squared=True))
        apart[lr] = abs(four.weight / one.weight - 1)
        assert isclose(apart[lr], 1.5 * 64 * lr**2, rel_tol=0.05) == (lr < 0.1)
        assert isclose(one.weight, (1 - lr) ** 64, rel_tol=1e-10)
        assert isclose(four.weight, (1 - 4 * lr) ** 16, rel_tol=1e-10)
        table.add_row(
            lr_on_one_process=lr,
            w_after_64_steps_on_one_process=one.weight,
            lr_on_four=factor * lr,
            w_after_16_steps_on_four=four.weight,
            apart=apart[lr] if four.weight < 1 else "diverges",
            first_order=1.5 * 64 * lr**2 if lr < 0.1 else "",
        )
    assert isclose(apart[0.01], 100 * apart[0.001], rel_tol=0.05)
    momentum = Toy(4, 0.001, squared=True, optimizer=partial(SGD, momentum=0.9))
    one, four = one_process(momentum), four_processes(replace(momentum, lr=factor * 0.001))
    assert abs(four.weight / one.weight - 1) > 100 * apart[0.001]
    table.add_row(
        lr_on_one_process="0.001, momentum 0.9",
        w_after_64_steps_on_one_process=one.weight,
        lr_on_four=factor * 0.001,
        w_after_16_steps_on_four=four.weight,
        apart=abs(four.weight / one.weight - 1),
        first_order="",
    )


@claim(
    "true with plain SGD when single steps on new examples are looked at; after an epoch it is "
    "linear scaling that keeps it",
    root=2.0,
    fails_when=Change("the learning rate is multiplied by four instead of its root", root=4.0),
)
def test_square_root_scaling_keeps_the_variance_of_a_step(table: Table, root: float) -> None:
    """Multiply the learning rate by the square root: that keeps the noise of the small batch.

    A mean over four times the examples has a quarter of the variance, and twice the rate makes up
    for it. But an epoch of new examples has a quarter of the steps: the weight goes half as far,
    and scatters half as much. Linear scaling keeps both.

    A mean over four times as many examples has a quarter of the variance, and twice the learning
    rate makes up for that: the variance of an update step, lr^2 v / batch, stays the same (v is the
    variance of one example's gradient). But an epoch has a quarter of the steps. So the weight goes
    half as far, and its variance over the experiments is a quarter. Linear scaling multiplies the
    variance of a step by four, and keeps mean and variance of the weight after an epoch.
    """
    runs = (
        ("not changed", 1, one_process(Toy(16, 1e-3, noise=1.0, experiments=NOISY)), 1.0),
        ("square root", 4, four_processes(Toy(16, root * 1e-3, 1.0, NOISY)), 2.0),
        ("linear", 4, four_processes(Toy(16, 4e-3, 1.0, NOISY)), 4.0),
    )
    for name, processes, course, factor in runs:
        lr = factor * 1e-3
        of_steps = lr**2 * VARIANCE / (16 * processes)
        assert isclose(course.variance_of_steps, of_steps, rel_tol=0.03)
        assert isclose(course.variance_of_weight, of_steps * course.steps, rel_tol=0.1)
        assert isclose(1 - course.weight, lr * course.steps * MEAN, rel_tol=0.02)
        table.add_row(
            learning_rate=f"{name}: {lr:.4g}",
            effective_batch=16 * processes,
            steps=course.steps,
            w_after_the_epoch=course.weight,
            variance_of_update_steps=beside(course.variance_of_steps, of_steps),
            variance_of_w_after_the_epoch=beside(
                course.variance_of_weight, of_steps * course.steps
            ),
        )


@claim(
    "false",
    factor=1.0,
    fails_when=Change("the learning rate is multiplied by four", factor=4.0),
)
def test_more_processes_make_no_larger_updates(table: Table, factor: float) -> None:
    """From 4 to 16 nodes at the same rate the weight updates get huge; linear scaling cures that.

    With plain SGD the mean update stays as long, because the gradient is a mean, and its noise
    falls with the root of the batch. Linear scaling makes updates larger, because an epoch has
    fewer of them. Updates that grow with the nodes at the same rate then come from gradients that
    are summed.

    One process and four stand for 4 nodes and 16, each with batches of 16.
    """
    one = one_process(Toy(16, 1e-3, noise=1.0, experiments=NOISY))
    for name, lr, course in (
        ("one, not changed", 1e-3, one),
        ("four, not changed", 1e-3, four_processes(Toy(16, factor * 1e-3, 1.0, NOISY))),
        ("four, linear", 4e-3, four_processes(Toy(16, 4e-3, 1.0, NOISY))),
    ):
        mean = (1 - course.weight) / course.steps
        before = (1 - one.weight) / one.steps
        deviation = (course.variance_of_steps / one.variance_of_steps) ** 0.5
        if name == "four, not changed":
            assert isclose(mean, before, rel_tol=0.02)
            assert isclose(deviation, 0.5, rel_tol=0.02)
        table.add_row(
            processes=name,
            lr=lr,
            mean_update=f"{mean:.3g} ({mean / before:.3g} times)",
            standard_deviation_of_an_update=f"{deviation:.3g} times",
        )


@claim(
    "true with plain SGD when the learning rate grows less than the batch, and the gradient hardly "
    "changes meanwhile",
    root=2.0,
    fails_when=Change("the learning rate is multiplied by four", root=4.0),
)
def test_more_epochs_are_needed_unless_the_rate_grows_as_much(table: Table, root: float) -> None:
    """With more GPUs you need more epochs to get there.

    An epoch goes as far as its steps times the rate. With four times the batch there are a quarter
    of the steps: at twice the rate (the square root) it takes two epochs, and the weights then
    scatter less, 0.71 times as much. At four times the rate one epoch is enough.

    Every epoch has new examples here. The deviation is that of the weight over the experiments.
    """
    one = one_process(Toy(16, 1e-3, noise=1.0, experiments=NOISY))
    for name, lr, epochs in (
        ("square root", root * 1e-3, 1),
        ("square root", root * 1e-3, 2),
        ("linear", 4e-3, 1),
    ):
        course = four_processes(Toy(16, lr, 1.0, NOISY, examples=256 * epochs))
        way = (1 - course.weight) / (1 - one.weight)
        scatter = (course.variance_of_weight / one.variance_of_weight) ** 0.5
        expected = 1 if name == "linear" else epochs / 2
        assert isclose(way, expected, rel_tol=0.03)
        assert isclose(scatter, 1 if name == "linear" else (epochs / 4) ** 0.5, rel_tol=0.06)
        table.add_row(
            learning_rate=f"{name}: {lr:g}",
            epochs=epochs,
            steps=course.steps,
            way=f"{way:.3g} times that of one process",
            deviation=f"{scatter:.3g} times",
        )
