"""One process per machine that drives several GPUs: a sum inside, an average between.

Inside a process nn.DataParallel is emulated on the CPU, as above. Between the processes it is real
DDP, which wraps the emulated module. `g` is the gradient of one batch of 16 in one process. The
error of a gradient is its distance to `g`, relative to the size of `g`.
"""

from __future__ import annotations

from torch import Tensor

from ddp_equivalence import Rank
from ddp_equivalence.ranks.warm_ranks import on_ranks
from ddp_equivalence.strategies.emulated_data_parallel import EmulatedDataParallel
from tests.claims.claim import Change, Table, claim
from tests.claims.ddp import wrapped
from tests.claims.setting import (
    big_batch_gradient,
    equal,
    error,
    flat_gradient,
    model_and_batch,
    mse,
    parts_of_gradient,
    times,
    weights,
)

PER_GPU = 4


def sum_inside_average_between(
    rank: Rank, gpus: tuple[int, ...], divides: bool = True, by_count: bool = False
) -> Tensor:
    """The gradient if process r drives ``gpus[r]`` GPUs with 4 examples each, and has one loss.

    ``by_count``: the loss is multiplied by the process's share of all GPUs and by the number of
    processes.
    """
    start = PER_GPU * sum(gpus[: rank.rank])
    mine = slice(start, start + PER_GPU * gpus[rank.rank])
    model, rows, targets = model_and_batch()
    ddp = wrapped(EmulatedDataParallel(model, gpus[rank.rank]), divides)
    factor = rank.world_size * gpus[rank.rank] / sum(gpus) if by_count else 1.0
    (factor * mse(ddp, rows[mine], targets[mine])).backward()
    gradient = flat_gradient(model)
    del ddp
    return gradient


@claim(
    "false",
    divides=True,
    fails_when=Change("DDP adds up the machines' gradients and does not divide", divides=False),
)
def test_sum_inside_and_average_between_is_the_big_batch(table: Table, divides: bool) -> None:
    """With one process per machine, gradients are summed inside and averaged between, a mix of two
    rules that cannot be the gradient of one big batch.

    The sum inside a machine is the gradient of the mean over its examples, and the average of these
    means is the mean over all. All machines must have equally many examples.

    With two machines each process has one loss, the mean over its machine's 8 examples. The sum
    over the machine's GPUs is the gradient of that mean, and the average of the two machines'
    gradients is the gradient of the mean over 16. So 4 GPUs in one process, 2 GPUs in each of two
    processes and one GPU in each of four give the same gradient. All machines must have equally
    many examples.
    """
    expected = big_batch_gradient()
    for gpus, layout in (((4,), "1x1"), ((2, 2), "2x1"), ((1, 1, 1, 1), "2x2")):
        gradients = on_ranks(layout, sum_inside_average_between, gpus, divides)
        for gradient in gradients:
            assert equal(gradient, expected)
        table.add_row(
            processes=len(gpus),
            GPUs_per_process=gpus[0],
            batch_size_per_process=PER_GPU * gpus[0],
            gradient=times(gradients[0], expected),
        )


@claim(
    "true when there is one process per GPU",
    by_count=False,
    fails_when=Change("each machine's loss is weighted by its number of examples", by_count=True),
)
def test_uneven_machines_are_not_the_big_batch(table: Table, by_count: bool) -> None:
    """Every GPU gets the same batch size, so it does not matter that one machine has fewer GPUs.

    DDP averages over processes, not GPUs. With one process for each machine, an example on a
    machine with one GPU counts three times as much as one on a machine with three. Start a process
    for each GPU, or multiply each loss by the machine's share of the examples and by the number of
    processes.

    DDP averages over processes, not over GPUs. With one process per machine, the 4 examples of a
    machine with one GPU count as much as the 12 examples of a machine with three. So an example of
    the first machine counts three times as much as one of the second. Start one process per GPU, so
    that all processes have equal batches. Or multiply each machine's loss by its share of all
    examples and by the number of processes. The rows with one process per machine emulate the GPUs
    inside a machine; the row with one process per GPU does not.
    """
    expected = big_batch_gradient()
    gpus = (1, 3)
    gradient = on_ranks("2x1", sum_inside_average_between, gpus, True, by_count)[0]
    assert error(gradient, expected) > 0.01
    corrected = on_ranks("2x1", sum_inside_average_between, gpus, True, True)[0]
    per_gpu = on_ranks("1+3", sum_inside_average_between, (1, 1, 1, 1))[0]
    assert equal(corrected, expected)
    assert equal(per_gpu, expected)
    for processes, found in (
        ("one per machine", gradient),
        ("one per machine, loss times 0.5 on the first and 1.5 on the second", corrected),
        ("one per GPU", per_gpu),
    ):
        table.add_row(
            processes=processes,
            weight_of_an_example_by_machine=weights(found, parts_of_gradient((4, 12))),
            error_of_the_gradient=error(found, expected),
        )
