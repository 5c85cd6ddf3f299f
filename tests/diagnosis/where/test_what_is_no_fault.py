"""Lines that a right step has as well are not marked, and what was not seen is not believed."""

from __future__ import annotations

from dataclasses import replace
from inspect import getsourcefile, getsourcelines
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import check
from ddp_equivalence.case import settings
from ddp_equivalence.diagnosis.repairs.find_repairs import Repair, Repairs, lines_of_repairs
from ddp_equivalence.diagnosis.where.lines_of_divergences import is_of_torch
from ddp_equivalence.measurement.calls import CodeLine, Operation
from ddp_equivalence.report.cause import how_sure
from ddp_equivalence.report.verdict import Verdict
from tests.diagnosis.where.faulty import (
    CASE,
    Small,
    average,
    batch,
    distance,
    loss,
    marked_line,
    unnamed,
)

pytestmark = pytest.mark.self_check

UNEVEN = replace(CASE, shards="6+5+3+2")


def judged(step: Any, case: Any = CASE) -> Verdict:
    with settings.using(settings.replaced(trial_seconds=0)):
        return check(case, step)


def marked(verdict: Verdict) -> list[int]:
    lines = verdict.best.lines if verdict.best else ()
    return [one.line.number for one in lines if one.is_fault]


# A mean over a rank's own rows is another one than over all rows. Whether that is wrong depends on
# how it is weighted.


def masked(generator: torch.Generator) -> dict[str, Tensor]:
    made = batch(generator)
    counts = torch.arange(16)[:, None] % 5
    return {**made, "mask": (torch.arange(3) < counts).to(made["rows"].dtype)}


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    return (values * mask).sum() / mask.sum()


def one_term(model: Any, batch: Any) -> Any:
    return masked_mean((model(batch["rows"]) - batch["targets"]).square(), batch["mask"])


def two_terms(model: Any, batch: Any) -> Any:
    return one_term(model, batch) + masked_mean(model(batch["rows"]), batch["mask"])


def share_of(mask: Tensor) -> Tensor:
    total = mask.sum()
    dist.all_reduce(total)
    return mask.sum() * dist.get_world_size() / total


def rounded_weight(model: Any, shard: Any, rank: Any) -> None:
    value = one_term(model, shard)
    share = round(float(share_of(shard["mask"])), 1)
    (value * share).backward()  # fault
    average(model)


def one_term_is_not_weighted(model: Any, shard: Any, rank: Any) -> None:
    outputs, mask = model(shard["rows"]), shard["mask"]
    penalty = masked_mean(outputs, mask)
    error = masked_mean((outputs - shard["targets"]).square(), mask)
    error = error * share_of(mask)
    value = error + penalty  # fault
    value.backward()
    average(model)


@pytest.mark.parametrize(
    ("step", "of_case"), [(rounded_weight, one_term), (one_term_is_not_weighted, two_terms)]
)
def test_not_the_mean_of_own_rows_is_marked_but_what_is_made_of_it(step: Any, of_case: Any) -> None:
    where = unnamed(replace(CASE, batch=masked, loss=of_case), step)
    (fault,) = (one for one in where.lines if one.is_fault)
    assert fault.line.number == marked_line(step), where.lines
    assert "on one rank, here" in fault.note  # it was found by its value


# Backward methods of the user's own.


def summed(gradient: Tensor) -> Tensor:
    whole = gradient.clone()
    dist.all_reduce(whole)
    return whole


class Shared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return summed(gradient) / dist.get_world_size()


class Dropping(torch.autograd.Function):
    """Its gradient is made in the forward pass, and not multiplied by what backward is given."""

    @staticmethod
    def forward(ctx: Any, outputs: Tensor, targets: Tensor) -> Tensor:
        ctx.save_for_backward(2 * (outputs - targets) / outputs.numel())
        return F.mse_loss(outputs, targets)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (made,) = ctx.saved_tensors
        return made, None  # fault


def bias_left_out(model: Any, shard: Any, rank: Any) -> None:
    """Ranks talk in backward, in a helper of a backward method, and reduce all but one bias."""
    own: Any = Shared
    value = loss(model, shard)
    (value + 0 * own.apply(value)).backward()
    for name, parameter in model.named_parameters():
        if name != "head.bias":
            dist.all_reduce(parameter.grad)
            parameter.grad /= rank.world_size


def weights_are_dropped(model: Any, shard: Any, rank: Any) -> None:
    own: Any = Dropping
    value = own.apply(model(shard["rows"]), shard["targets"])
    (value * len(shard["rows"]) * rank.world_size / 16).backward()
    average(model)


def test_what_a_backward_method_sends_is_no_reduction_that_came_too_early() -> None:
    assert judged(bias_left_out).causes == ("parameter_not_reduced",)


def test_means_do_not_count_equally_where_the_losses_are_weighted() -> None:
    where = unnamed(UNEVEN, weights_are_dropped)
    assert where.headline == "gradients do not depend on how the loss is scaled"
    assert [one.line.number for one in where.lines if one.is_fault] == [marked_line(Dropping)]


# Reductions that do what they should.


def one_rank_unscales(model: Any, shard: Any, rank: Any) -> None:
    (loss(model, shard) * 512).backward()
    average(model)
    if rank.rank == 0:  # fault
        for parameter in model.parameters():
            parameter.grad /= 512


def first_layer_unscaled(model: Any, shard: Any, rank: Any) -> None:
    (loss(model, shard) * 512).backward()
    average(model)
    for parameter in model.first.parameters():
        parameter.grad /= 512  # fault


def test_a_reduction_that_lacks_a_parameter_is_not_marked() -> None:
    verdict = judged(bias_left_out)
    assert verdict.best is not None
    reduces = [one for one in verdict.best.lines if "not that of head.bias" in one.note]
    assert [one.is_fault for one in reduces] == [False]


def test_the_line_that_only_one_rank_came_to_is_marked_and_not_what_it_does_there() -> None:
    where = unnamed(CASE, one_rank_unscales)
    faults = tuple(one for one in where.lines if one.is_fault)
    assert len(faults) == 1
    assert distance(replace(where, lines=faults), one_rank_unscales) <= 1, where.lines


def test_of_gradients_that_are_unscaled_in_part_the_line_that_chooses_them_is_marked() -> None:
    verdict = judged(first_layer_unscaled)
    assert verdict.causes == ("gradient_scaled_not_unscaled",)
    assert marked(verdict) == [marked_line(first_layer_unscaled)]


# What the big batch is computed with is right, and so are ranks that send zeros.


def shifted(rows: Tensor) -> Tensor:
    return rows.roll(1, 0)  # fault


def other_rows(model: Any, shard: Any, rank: Any) -> None:
    """The loss of the case is given other rows than it should be."""
    targets = shifted(shard["targets"])
    loss(model, {"rows": shard["rows"], "targets": targets}).backward()
    average(model)


def zeros_for_what_is_missing(model: Any, shard: Any, rank: Any) -> None:
    """Rank 0 has no gradient of the first layer, for which it sends zeros, as it should."""
    (loss(model, shard) * 0.9).backward()  # fault
    for name, parameter in model.named_parameters():
        if rank.rank == 0 and name.startswith("first"):
            parameter.grad = None
        own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        dist.all_reduce(own)
        parameter.grad = own / rank.world_size


def test_a_line_of_the_case_is_not_marked_where_it_is_given_other_rows() -> None:
    where = unnamed(CASE, other_rows)
    first, last = getsourcelines(loss)[1], getsourcelines(loss)[1] + len(getsourcelines(loss)[0])
    of_loss = [one for one in where.lines if first <= one.line.number < last]
    assert not any(one.is_fault for one in of_loss if one.line.file == getsourcefile(loss))
    assert not where.headline.startswith("line ") or distance(where, shifted) <= 2


def test_ranks_that_send_zeros_do_not_add_up_different_parameters() -> None:
    verdict = judged(zeros_for_what_is_missing)
    found = verdict.localisation.whereabouts
    assert found is None or "different parameters" not in found.headline


# More than one mistake, and numbers that were not seen.


def not_reduced_and_another_weight(model: Any, shard: Any, rank: Any) -> None:
    (loss(model, shard) * (1 + rank.rank)).backward()


def part_of_the_ranks(model: Any, shard: Any, rank: Any) -> None:
    """The sum of all ranks but the last, of losses that have a wrong factor."""
    (loss(model, shard) * 0.9).backward()
    for parameter in model.parameters():
        parts = [torch.empty_like(parameter) for _ in range(rank.world_size)]
        dist.all_gather(parts, parameter.grad)
        parameter.grad = torch.stack(parts[:-1]).sum(0)


def test_a_fix_says_that_the_mean_would_be_wrong_as_well() -> None:
    verdict = judged(not_reduced_and_another_weight)
    assert verdict.causes == ("no_all_reduce",)
    assert verdict.best is not None
    assert verdict.best.fix.endswith("so something else is wrong, too.")


def the_same_rows(model: Any, batch: Any, rank: Any) -> None:
    loss(model, {name: leaf[:4] for name, leaf in batch.items()}).backward()


@pytest.mark.parametrize(
    ("step", "shards"),
    [
        (lambda model, shard, rank: loss(model, shard).backward(), "equal"),
        (the_same_rows, "own"),
    ],
)
def test_a_fix_does_not_say_so_where_another_one_is_enough(step: Any, shards: str) -> None:
    verdict = judged(step, replace(CASE, shards=shards))
    assert verdict.best is not None
    assert "something else" not in verdict.best.fix


def test_a_cause_that_was_not_seen_is_not_believed_together_with_a_factor() -> None:
    verdict = judged(part_of_the_ranks)
    assert verdict.causes == ()
    found = verdict.localisation.whereabouts
    assert found is not None
    assert found.headline == "gradients of some ranks are missing"


def test_a_cause_beside_another_mistake_does_not_explain_every_element() -> None:
    assert how_sure(judged(not_reduced_and_another_weight)) == ""
    assert how_sure(judged(copy_is_reduced)) == "Fits every element."


def divided_before_a_copy_is_reduced(model: Any, shard: Any, rank: Any) -> None:
    (loss(model, shard) / rank.world_size).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad.clone())


def copy_is_reduced(model: Any, shard: Any, rank: Any) -> None:
    loss(model, shard).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad.clone())


@pytest.mark.parametrize(
    ("step", "end"),
    [(divided_before_a_copy_is_reduced, "."), (copy_is_reduced, ", as the mean over all ranks.")],
)
def test_a_fix_divides_only_what_the_step_has_not_divided(step: Any, end: str) -> None:
    verdict = judged(step)
    assert verdict.causes == ("reduced_buffer_not_used",)
    assert verdict.best is not None
    assert verdict.best.fix == f"write what was reduced back into each .grad{end}"


# Lines that choose what is read, and what keeps DDP from reducing.

TABLE = torch.linspace(0.5, 1.5, 16)


class AtLevels(Small):
    """Is told how much noise its rows have."""

    def forward(self, rows: Tensor, level: Tensor) -> Any:  # type: ignore[override]
        return super().forward(rows) * (1 + level[:, None] / 16)


def weighted(model: Any, batch: Any) -> Any:
    level = TABLE.to(batch["rows"].dtype)[batch["level"]]
    noisy = level[:, None] * batch["rows"]
    return (model(noisy, batch["level"]) - batch["targets"]).square().mean()


def with_levels(generator: torch.Generator) -> dict[str, Tensor]:
    return {**batch(generator), "level": torch.randperm(16, generator=generator)}


def micro_batches(shard: Any) -> Any:
    count = len(shard["rows"]) // 3
    for number in range(count):
        yield {name: leaf[number * 3 : number * 3 + 3] for name, leaf in shard.items()}  # fault


def drops_the_last_example(model: Any, shard: Any, rank: Any) -> None:
    for micro in micro_batches(shard):
        (weighted(model, micro) * 3 / 4).backward()
    average(model)


def test_neither_a_line_of_the_case_nor_a_constant_chooses_the_examples() -> None:
    noisy = replace(CASE, model=AtLevels, batch=with_levels, loss=weighted)
    verdict = judged(drops_the_last_example, noisy)
    assert verdict.causes == ("examples_dropped",)
    assert abs(max(marked(verdict)) - marked_line(micro_batches)) <= 2
    assert min(marked(verdict)) > getsourcelines(micro_batches)[1]


def frozen_when_wrapped(model: Any, shard: Any, rank: Any) -> None:
    """DDP knows nothing of the head, and ranks multiply by other numbers. That no_sync is entered
    for the first half is right.
    """
    model.head.requires_grad_(False)
    ddp = DistributedDataParallel(model)
    model.head.requires_grad_(True)
    first, last = ({name: leaf[half::2] for name, leaf in shard.items()} for half in (0, 1))
    with ddp.no_sync():
        (loss(ddp, first) / 2).backward()
    (loss(ddp, last) / 2).backward()
    for parameter in model.parameters():
        parameter.grad *= 1 + 0.1 * rank.rank


def test_no_sync_is_not_marked_where_other_gradients_are_reduced() -> None:
    where = unnamed(CASE, frozen_when_wrapped)
    assert where.headline == "gradients of some ranks are missing"
    assert not any("no synchronisation" in one.note for one in where.lines), where.lines


# Edits of lines that lie far from each other.


def test_edits_of_lines_far_from_each_other_mark_none_of_them() -> None:
    near, far = (CodeLine("own.py", number, "step") for number in (10, 40))
    beside = Repairs((Repair(near, "a", "b"), Repair(replace(near, number=11), "c", "d")), 2, 5, 5)
    assert [one.is_fault for one in lines_of_repairs(beside)] == [True, False]
    apart = Repairs((Repair(near, "a", "b"), Repair(far, "c", "d")), 2, 5, 5)
    assert not any(one.is_fault for one in lines_of_repairs(apart))
    assert apart.text.startswith("line 10 with `b` in place of `a`, or line 40 with `d` in place")


# Memory that nothing was written to, losses that are right together, and what only puts gradients
# beside each other.


def made_room_first(model: Any, shard: Any, rank: Any) -> None:
    """The weights of two ranks are wrong. Before gradients are written, their memory is not set."""
    loss(model, shard).backward()
    flat = torch.cat([one.grad.flatten() for one in model.parameters()])
    flat *= 1 + 0.5 * (rank.rank % 2)
    dist.all_reduce(flat)
    flat /= rank.world_size
    torch.use_deterministic_algorithms(True)  # what is not set is nan then
    try:
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter)  # room
    finally:
        torch.use_deterministic_algorithms(False)
    torch.nn.utils.vector_to_parameters(flat, [one.grad for one in model.parameters()])


def test_a_line_that_makes_room_for_gradients_is_not_said_to_change_them() -> None:
    where = unnamed(CASE, made_room_first)
    source, first = getsourcelines(made_room_first)
    room = next(n for n, text in enumerate(source, first) if text.rstrip().endswith("# room"))
    assert room not in [one.line.number for one in where.lines], where.lines
    assert "weights" in where.sentence or "times" in where.sentence, where.sentence


class Centred(Small):
    """The mean of all rows is taken from the outputs."""

    def forward(self, rows: Tensor, average: Any = lambda mean: mean) -> Any:
        outputs = super().forward(rows)
        return outputs - average(outputs.mean(0))


class AveragedForwardOnly(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mean: Tensor) -> Tensor:
        mean = mean.clone()
        dist.all_reduce(mean)
        return mean / dist.get_world_size()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] / dist.get_world_size()  # fault


def centre_of_all_ranks(model: Any, shard: Any, rank: Any) -> None:
    outputs = model(shard["rows"], AveragedForwardOnly.apply)
    F.mse_loss(outputs, shard["targets"]).backward()
    average(model)


def test_losses_whose_mean_is_the_big_batch_s_are_right() -> None:
    where = unnamed(replace(CASE, model=Centred), centre_of_all_ranks)
    assert "its loss is" not in where.headline
    assert "The loss is right" in where.sentence
    assert marked_line(AveragedForwardOnly) in [one.line.number for one in where.lines]


def packed_and_squashed(model: Any, shard: Any, rank: Any) -> None:
    gradients = torch.autograd.grad(loss(model, shard), list(model.parameters()))
    flat = torch.cat([one.flatten() for one in gradients])
    flat = flat / (1.0 + flat.abs())  # fault
    dist.all_reduce(flat)
    flat /= rank.world_size
    sizes = [one.numel() for one in model.parameters()]
    for parameter, part in zip(model.parameters(), flat.split(sizes), strict=True):
        parameter.grad = part.view_as(parameter).clone()


def test_gradients_beside_each_other_are_no_other_values_than_the_loss_has() -> None:
    where = unnamed(CASE, packed_and_squashed)
    faults = [one.line.number for one in where.lines if one.is_fault]
    packed = marked_line(packed_and_squashed) - 1
    assert packed + 1 in faults
    assert packed not in faults, where.lines


def all_but_the_head(model: Any) -> None:
    for name, parameter in model.named_parameters():
        if name != "head.bias":
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


def centre_of_all_ranks_and_one_is_left_out(model: Any, shard: Any, rank: Any) -> None:
    outputs = model(shard["rows"], AveragedForwardOnly.apply)
    F.mse_loss(outputs, shard["targets"]).backward()
    all_but_the_head(model)


def test_losses_that_are_right_together_are_right_where_the_ranks_hold_different_gradients() -> (
    None
):
    verdict = judged(centre_of_all_ranks_and_one_is_left_out, replace(CASE, model=Centred))
    text = " ".join(str(verdict).split())
    assert "its loss is" not in text
    assert "The loss is right" in text


# Rows that are read once for each of two terms, values in the order of their size, bytes of
# objects, and hooks that run in a backward pass.


def two_parts(outputs: Tensor, border: Tensor, weight: Tensor) -> Tensor:
    return outputs.square().mean() + weight * border.square().mean()


def with_border(model: Any, batch: Any) -> Any:
    border = model(batch["rows"][::3])
    return two_parts(model(batch["rows"]), border, border.detach().square().mean().sqrt())


def weighted_by_the_own_border(model: Any, shard: Any, rank: Any) -> None:
    with_border(model, shard).backward()
    average(model)


def test_rows_that_are_read_for_two_terms_are_those_of_the_rank_once() -> None:
    where = unnamed(replace(CASE, loss=with_border, layout="1x2"), weighted_by_the_own_border)
    assert where.headline == "the mean of the ranks' gradients is not the big batch's"
    assert "more often" not in where.sentence


def hardest(model: Any, batch: Any) -> Any:
    errors = (model(batch["rows"]) - batch["targets"]).square().flatten()
    return errors.topk(len(batch["rows"])).values.mean()  # as many as there are rows


def hardest_of_the_rank(model: Any, shard: Any, rank: Any) -> None:
    hardest(model, shard).backward()
    all_but_the_head(model)


def test_the_largest_values_of_a_rank_are_not_held_against_those_of_other_places() -> None:
    where = unnamed(replace(CASE, loss=hardest, layout="1x2"), hardest_of_the_rank)
    notes = [one.note for one in where.lines]
    assert any("topk" in note for note in notes), notes
    assert not any("topk: rank" in note for note in notes), notes
    # The head is not reduced, and to reduce what the ranks have computed is not enough.
    assert where.headline == "gradients of some ranks are missing"
    assert where.fix == ""
    assert not any(one.is_fault for one in where.lines), where.lines


def places(embed: Any, numbers: Any, received: Any) -> Any:
    rows = embed(numbers)
    dist.all_gather_object(received, rows)
    return rows, torch.arange(len(rows)), torch.ones_like(rows)


@pytest.mark.parametrize(
    ("name", "line", "is_of_torch_itself"),
    [
        ("arange", 1, True),  # an nn.EmbeddingBag counts where its bags begin
        ("embedding", 1, False),
        ("tensor", 2, True),
        ("arange", 3, False),
        ("ones_like", 3, False),
    ],
)
def test_what_torch_counts_for_itself_is_no_value_that_differs(
    name: str, line: int, is_of_torch_itself: bool
) -> None:
    at = CodeLine(__file__, getsourcelines(places)[1] + line, "places")
    assert is_of_torch(Operation(name, at, (), (), ())) == is_of_torch_itself


def halved(state: Any, bucket: Any) -> Any:
    reduced = dist.all_reduce(bucket.buffer() * 0.37, async_op=True).get_future()
    return reduced.then(lambda future: future.value()[0])


def hooked(model: Any, shard: Any, rank: Any) -> None:
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(None, lambda state, bucket: halved(state, bucket))
    loss(ddp, shard).backward()


def test_the_call_of_backward_is_not_marked_for_what_a_hook_does_in_it() -> None:
    verdict = judged(hooked)
    where = verdict.localisation.whereabouts
    assert where is not None
    marked = [one.note for one in where.lines if one.is_fault]
    assert not any("backward" in note for note in marked), str(verdict)


class GathersForwardOnly(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor) -> Tensor:
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, own.contiguous())  # gather
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].chunk(dist.get_world_size())[dist.get_rank()]  # fault


def against_all(own: Tensor, all_of_them: Tensor, scale: Tensor, first: int) -> Tensor:
    logits = own @ all_of_them.T / scale.std()
    return F.cross_entropy(logits, torch.arange(len(own)) + first)


def contrast(model: Any, batch: Any) -> Any:
    outputs = model(batch["rows"])
    return against_all(outputs, outputs, batch["targets"], 0)


def gathered_with_a_column(model: Any, shard: Any, rank: Any) -> None:
    outputs = model(shard["rows"])
    gather: Any = GathersForwardOnly.apply
    every = gather(outputs)
    columns = [torch.empty_like(shard["targets"]) for _ in range(rank.world_size)]
    dist.all_gather(columns, shard["targets"].contiguous())  # of a column
    against_all(outputs, every, torch.cat(columns), rank.rank * len(outputs)).backward()
    average(model)


def test_of_several_gathers_that_of_the_own_function_is_shown() -> None:
    verdict = judged(gathered_with_a_column, replace(CASE, loss=contrast))
    assert verdict.cause == "gather_without_gradient", str(verdict)
    text = str(verdict)
    assert "# gather" in text
    assert "# of a column" not in text


def two_losses_and_a_mean(model: Any, shard: Any, rank: Any) -> None:
    """Each rank adds up two losses where one has their mean; one parameter is reduced twice."""
    for half in (slice(0, 4), slice(4, 8)):
        loss(model, {name: leaf[half] for name, leaf in shard.items()}).backward()
    for parameter in (*model.parameters(), model.head.weight):
        dist.all_reduce(parameter.grad)
        parameter.grad.div_(rank.world_size)  # the mean
        parameter.grad *= 1.0
    dist.all_reduce(model.head.bias.grad)


def test_the_division_that_leaves_the_mean_of_the_ranks_is_not_marked() -> None:
    verdict = judged(two_losses_and_a_mean, replace(CASE, layout="1x2"))
    marked_lines = [line for line in str(verdict).splitlines() if line.startswith("> ")]
    assert "2 times the right weight" in " ".join(str(verdict).split())
    assert not any("# the mean" in line for line in marked_lines), str(verdict)


# Causes that would leave a mistake, or make right gradients wrong.


def divided_again(model: Any, shard: Any, rank: Any) -> None:
    own_centre(model, shard).backward()
    average(model)
    for parameter in model.parameters():
        parameter.grad.div_(rank.world_size)


def own_centre(model: Any, batch: Any) -> Any:
    outputs = model(batch["rows"])
    return (outputs - outputs.mean(0)).square().mean().sqrt() * outputs.std()


def test_a_division_too_many_of_a_wrong_mean_leaves_a_mistake() -> None:
    verdict = judged(divided_again, replace(CASE, loss=own_centre))
    text = " ".join(str(verdict).split())
    assert verdict.causes == ("averaged_twice",)
    assert "so something else is wrong, too" in text
    assert "Fits the numbers" not in text
    assert "Fits every element" not in text
