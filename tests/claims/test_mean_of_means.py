"""The average of the processes' losses: when it is the loss of the big batch.

`loss1` and `loss2` are the means that two processes take over their own examples (or tokens), under
real DDP. `g` is the gradient of all of them in one batch, in one process. An error is the distance
to the right value, relative to its size. The weight of an example is how much it counts, relative
to how much it counts in the big batch.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_equivalence.ranks.warm_ranks import on_ranks
from tests.claims.claim import Change, Table, claim
from tests.claims.ddp import Loss, ddp_gradient
from tests.claims.padded import big_token_batch, over_all_tokens, over_own_tokens, token_gradient
from tests.claims.setting import (
    big_batch_gradient,
    error,
    flat_gradient,
    model_and_batch,
    mse,
    parts_of_gradient,
    weights,
)


def over_all_examples(model: nn.Module, rows: Tensor, targets: Tensor) -> Tensor:
    """The sum over own examples, times the number of processes, divided by the examples of all."""
    count = torch.tensor(float(len(rows)), dtype=torch.double)
    dist.all_reduce(count)
    return mse(model, rows, targets) * len(rows) * dist.get_world_size() / count


def with_class_weights(model: nn.Module, rows: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy of the largest target, with a weight for each class."""
    weights = torch.tensor([10.0, 1.0, 1.0], dtype=torch.double)
    return nn.functional.cross_entropy(model(rows), targets.argmax(1), weights)


def with_batch_norm(model: nn.Module, rows: Tensor, targets: Tensor) -> Tensor:
    """The mean squared error behind a batch norm over the examples of this process."""
    normal = nn.functional.batch_norm(model(rows), None, None, training=True)
    return nn.functional.mse_loss(normal, targets)


@claim(
    "true when both losses are unweighted means over equally many examples, and each example has "
    "a loss of its own",
    own_loss=mse,
    fails_when=Change(
        "each loss is weighted by its number of examples", own_loss=over_all_examples
    ),
)
def test_the_mean_of_two_losses_is_the_big_batch(table: Table, own_loss: Loss) -> None:
    """(loss1 + loss2) / 2 is the loss of the big batch, and so is its gradient.

    An average of means weighs every process the same: with 15 and 1 examples the one counts as much
    as the fifteen. The class weights of cross_entropy break it at equal counts, because each mean
    divides by its own sum of weights; batch norm does, because it looks across examples. For any
    counts multiply the sum by the number of processes, and divide by the examples of all.

    The number of examples in all processes is from an all-reduce. The last two rows have a linear
    layer with class weights 10, 1 and 1, and one with batch norm behind it.
    """
    expected = big_batch_gradient()
    model, rows, targets = model_and_batch()
    big_loss = float(mse(model, rows, targets).detach())
    for sizes in ((8, 8), (10, 6), (15, 1)):
        for divided_by, loss in (("own count", own_loss), ("global count", over_all_examples)):
            first, second = on_ranks("1x2", ddp_gradient, sizes, loss)
            assert torch.equal(first.gradient, second.gradient)
            of_gradient = error(first.gradient, expected)
            of_loss = abs((first.loss + second.loss) / 2 - big_loss) / big_loss
            right = sizes == (8, 8) or divided_by == "global count"
            assert (of_gradient < 1e-12, of_gradient > 0.1) == (right, not right)
            assert (of_loss < 1e-12, of_loss > 0.01) == (right, not right)
            table.add_row(
                examples=f"{sizes[0]} and {sizes[1]}",
                losses_divide_by=divided_by,
                weight_of_an_example_by_process=weights(first.gradient, parts_of_gradient(sizes)),
                error_of_the_loss=of_loss,
                error_of_the_gradient=of_gradient,
            )
    for name, loss in (("class weights", with_class_weights), ("batch norm", with_batch_norm)):
        first, second = on_ranks("1x2", ddp_gradient, (8, 8), loss)
        assert torch.equal(first.gradient, second.gradient)
        model.zero_grad()
        loss(model, rows, targets).backward()
        off = error(first.gradient, flat_gradient(model))
        assert off > 0.1
        table.add_row(
            examples="8 and 8",
            losses_divide_by=f"own count, {name}",
            weight_of_an_example_by_process="",
            error_of_the_loss="",
            error_of_the_gradient=off,
        )


@claim(
    "true when both processes have equally many tokens that count in the loss",
    own_loss=over_own_tokens,
    fails_when=Change("each loss is weighted by its number of tokens", own_loss=over_all_tokens),
)
def test_equal_batch_sizes_are_not_equal_token_counts(table: Table, own_loss: Loss) -> None:
    """The batch sizes are equal, so averaging is right, whether the sequences are padded or not.

    A mean over tokens divides by those of its own process, not by sequences. With 23 and 9 tokens a
    token of the short sequences counts 2.6 times one of the long. Divide the sum by the tokens of
    all processes, and multiply by the number of processes, by which DDP divides.

    `cross_entropy(..., ignore_index=-100)` is a mean over tokens, so each process divides by its
    number of tokens, not of sequences. Here two processes get four of the same eight sequences
    each. If both get 16 tokens, the average is the big batch. If the sequences are sorted by length
    it is not: a token of the short sequences counts more than twice as much as one of the long
    ones. Dividing by the number of tokens in all processes is always right.
    """
    for lengths in (((6, 1, 6, 3), (5, 2, 6, 3)), ((6, 6, 6, 5), (3, 3, 2, 1))):
        expected, parts = big_token_batch(lengths)
        for divided_by, loss in (("own tokens", own_loss), ("all tokens", over_all_tokens)):
            gradient, other = on_ranks("1x2", token_gradient, lengths, loss)
            assert torch.equal(gradient, other)
            found = error(gradient, expected)
            right = sum(lengths[0]) == sum(lengths[1]) or divided_by == "all tokens"
            assert (found < 1e-12, found > 0.1) == (right, not right)
            table.add_row(
                sequences="4 and 4",
                tokens=f"{sum(lengths[0])} and {sum(lengths[1])}",
                losses_divide_by=divided_by,
                weight_of_a_token_by_process=weights(gradient, parts),
                error_of_the_gradient=found,
            )
