"""Uneven inputs: processes that have fewer batches than others, under torch's Join.

Four processes have 3, 3, 2 and 1 batches of two examples, so 4, 3 and 2 of them take part in steps
1, 2 and 3. (Without Join a process with more batches would wait in its all-reduce for the others,
until the timeout.)
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from fractions import Fraction

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Rank
from ddp_equivalence.ranks.warm_ranks import on_ranks
from tests.claims.claim import Change, Table, claim
from tests.claims.numbered import apart, gradient_of, same, task
from tests.claims.setting import flat_gradient, mse, times
from tests.claims.setting import weights as weights_of

EXAMPLES = 18
BATCHES = (
    ((0, 1), (2, 3), (4, 5)),
    ((6, 7), (8, 9), (10, 11)),
    ((12, 13), (14, 15)),
    ((16, 17),),
)
"""The numbers of the examples, by rank and step."""

SHORT = (*BATCHES[:3], ((16,),))
"""The same, but the batch of rank 3 has one example."""


def joined(rank: Rank, by_initial: bool, short: bool = False) -> list[Tensor]:
    """The gradient of each step that this rank takes part in, all at the same weights."""
    model, rows, targets = task(EXAMPLES)
    ddp = DistributedDataParallel(model)
    gradients = []
    with (
        warnings.catch_warnings(),  # Join changes the filters
        Join([ddp], divide_by_initial_world_size=by_initial),
    ):
        for batch in (SHORT if short else BATCHES)[rank.rank]:
            mine = list(batch)
            model.zero_grad()
            mse(ddp, rows[mine], targets[mine]).backward()
            gradients.append(flat_gradient(model))
    del ddp
    return gradients


def two_epochs(rank: Rank, by_initial: bool, momentum: float) -> tuple[Tensor, Tensor]:
    """The weights after an epoch under Join, and after one more step, which all ranks take."""
    model, _, _ = task(EXAMPLES)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum)

    with (
        warnings.catch_warnings(),  # Join changes the filters
        Join([ddp], divide_by_initial_world_size=by_initial),
    ):
        take_steps(ddp, optimizer, BATCHES[rank.rank])
    joined = nn.utils.parameters_to_vector(model.parameters()).detach()
    take_steps(ddp, optimizer, BATCHES[rank.rank][:1])
    del ddp
    return joined, nn.utils.parameters_to_vector(model.parameters()).detach()


def take_steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[Sequence[int]]
) -> None:
    _, rows, targets = task(EXAMPLES)
    for batch in batches:
        optimizer.zero_grad()
        mse(model, rows[list(batch)], targets[list(batch)]).backward()
        optimizer.step()


def left(step: int) -> list[int]:
    """The examples of this step, from all processes that still have some."""
    return [number for batches in BATCHES for batch in batches[step : step + 1] for number in batch]


def weight_of_an_example(gradient: Tensor, step: int) -> str:
    """The factor on the sum of the gradients of this step's examples, as a fraction."""
    added_up = gradient_of(left(step), EXAMPLES) * len(left(step))
    found = float(gradient @ added_up / (added_up @ added_up))
    assert same(gradient, found * added_up)
    return str(Fraction(found).limit_denominator(100))


@claim(
    "true without accumulation when divide_by_initial_world_size=False is given and all batches "
    "are equally large; over several epochs only with plain SGD",
    by_initial=False,
    fails_when=Change("DDP divides by the initial number of processes", by_initial=True),
)
def test_under_join_a_step_is_the_big_batch_of_what_is_left(table: Table, by_initial: bool) -> None:
    """With Join (or ddp.join()) uneven inputs train like one big batch.

    A process without data gives a gradient of zero. By default the sum is still divided by all W
    processes: k / W of the big batch of what k of them have left. With the option it is divided by
    k. Such a process takes no steps; Join finally sends it the weights, but no momentum, so that in
    the next epoch the ranks drift apart.

    A process that has no data left takes part with a gradient of zero. By default DDP still divides
    the sum by the number of processes at the start. With k of W processes left, the gradient is
    k / W of the big batch of the examples of that step: 0.75 g and 0.5 g here. With
    divide_by_initial_world_size=False DDP divides by the number of processes that are left, and the
    gradient is that of this big batch, although it is smaller than those of the steps before. In
    the last rows a second epoch follows, in which every process has the same one batch.
    """
    steps = on_ranks("2x2", joined, by_initial)[0]
    default = on_ranks("2x2", joined, True)[0]
    for step, processes in enumerate((4, 3, 2)):
        expected = gradient_of(left(step), EXAMPLES)
        assert same(steps[step], expected)
        assert same(default[step], expected * processes / 4)
        table.add_row(
            step=step + 1,
            processes_left=processes,
            examples=len(left(step)),
            default=times(default[step], expected),
            divide_by_initial_world_size_is_False=times(steps[step], expected),
        )
    for momentum in (0.0, 0.9):
        epochs = on_ranks("2x2", two_epochs, by_initial, momentum)
        after_join, after_both = zip(*epochs, strict=True)
        assert all(torch.equal(weights, after_join[0]) for weights in after_join)
        apart_by = max(apart(weights, after_both[0]) for weights in after_both)
        assert (apart_by == 0, apart_by > 1e-3) == (momentum == 0, momentum != 0)
        table.add_row(
            step=f"an epoch more, momentum {momentum:g}",
            processes_left=4,
            examples=8,
            default="",
            divide_by_initial_world_size_is_False=f"weights of the ranks {apart_by:.2g} apart",
        )


@claim(
    "true without accumulation when divide_by_initial_world_size is left at its default, True, and "
    "all batches are equally large",
    by_initial=True,
    fails_when=Change("DDP divides by the number of processes that are left", by_initial=False),
)
def test_under_join_every_example_weighs_the_same(table: Table, by_initial: bool) -> None:
    """Under Join an example counts as much as any other, whichever process it is on.

    By default every step is divided by the initial number of processes, so an example weighs
    1 / (processes x batch size) in each, and late steps look small. Divided by the processes that
    are left, late examples weigh more. A last batch of one example, where the others have two,
    gives it twice the weight.

    The gradients of the epoch add up to a multiple of the gradient of all examples, here 18 / 8 of
    it. In the last row the batch of process 3 has one example, whose weight is the second one.
    """
    whole = gradient_of(range(EXAMPLES), EXAMPLES)
    total = {}
    for name, how, expected in (
        ("default", by_initial, ["1/8", "1/8", "1/8"]),
        ("divide_by_initial_world_size=False", False, ["1/8", "1/6", "1/4"]),
    ):
        steps = on_ranks("2x2", joined, how)[0]
        weights = [weight_of_an_example(gradient, step) for step, gradient in enumerate(steps)]
        assert weights == expected
        total[name] = torch.stack(steps).sum(dim=0)
        table.add_row(
            Join=name,
            weight_of_an_example_in_step_1=weights[0],
            in_step_2=weights[1],
            in_step_3=weights[2],
            sum_over_the_epoch=f"{times(total[name], whole)} of all 18 examples",
        )
    first = on_ranks("2x2", joined, by_initial, True)[0][0]
    others = [number for batches in BATCHES[:3] for number in batches[0]]
    parts = [gradient_of(part, EXAMPLES) * len(part) for part in (others, [16])]
    short = weights_of(first, parts)
    assert short == "0.125 and 0.25"
    table.add_row(
        Join="default, a short last batch",
        weight_of_an_example_in_step_1=short,
        in_step_2="",
        in_step_3="",
        sum_over_the_epoch="",
    )
    assert same(total["default"], whole * 18 / 8)
    assert apart(total["divide_by_initial_world_size=False"], whole * 3) > 0.01
