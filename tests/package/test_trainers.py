"""Steps that train: optimizers, clipping, wrappers that live on, and each step of an optimizer."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import BadCase, Case, Rank, assert_equivalent, check
from ddp_equivalence.report.render import pointed_lines
from ddp_equivalence.report.verdict import Verdict, WrongStep
from tests.package import own_trainers
from tests.package.own_cases import EXAMPLES, build_model, loss, make_batch, own_case, right_step
from tests.package.own_trainers import CLIP, STEPS, adamw, momentum_with_schedule

AS_TRAINER: Any = {"compare": "update", "optimizer": adamw, "clip": CLIP, "steps": STEPS}


def judged(trainer: object, **changes: Any) -> Verdict:
    step: Any = trainer
    return check(own_case(), step, **(AS_TRAINER | changes))


def test_a_right_trainer_is_the_same() -> None:
    verdict = judged(own_trainers.Trainer())
    assert (verdict.outcome, verdict.wrong_step) == ("same", None)


def test_a_prepared_step_keeps_its_wrapper_and_its_schedule() -> None:
    assert_equivalent(
        own_case(),
        own_trainers.Prepared,
        compare="update",
        optimizer=momentum_with_schedule,
        steps=STEPS,
    )


def test_the_order_in_which_a_trainer_reads_is_no_difference() -> None:
    verdict = judged(own_trainers.Shuffles())
    assert verdict.outcome == "same"
    assert verdict.read_order
    assert "another order" in str(verdict)


def test_examples_that_a_shuffling_trainer_drops_are_named() -> None:
    verdict = judged(own_trainers.ShufflesAndDropsExamples())
    assert verdict.cause == "examples_dropped"
    assert verdict.wrong_step is not None
    assert verdict.wrong_step.number == 1
    assert sorted(verdict.read_order) == list(range(EXAMPLES))
    of_first_step = ", ".join(map(str, verdict.read_order[: EXAMPLES // STEPS]))
    assert f"Examples 0 to 3 of step 1 are {of_first_step} of the batch" in str(verdict)


def test_the_first_wrong_step_is_explained_by_its_gradients() -> None:
    verdict = judged(own_trainers.DropsExamplesLater())
    assert verdict.cause == "examples_dropped"
    assert verdict.wrong_step is not None
    assert (verdict.wrong_step.number, verdict.wrong_step.differs) == (2, "gradients")
    assert "optimizer step 2 of 3" in str(verdict)
    assert verdict.comparison is not None
    assert {one.key[0] for one in verdict.comparison.parameters} == {1}


def test_weights_that_are_wrong_after_right_gradients_are_told_with_their_line() -> None:
    verdict = judged(own_trainers.DoublesTheRateLater())
    assert (verdict.outcome, verdict.cause) == ("different", None)
    assert verdict.wrong_step is not None
    assert (verdict.wrong_step.number, verdict.wrong_step.differs) == (2, "weights")
    assert "optimizer.step()" in str(verdict)
    text = " ".join(str(verdict).split())
    assert text.count("lr is 0.02, and 0.01 in the reference") == 1
    assert "of optimizer step 2 of 3 are right, and the weights after it are not. " in text


class SchedulesFirst(own_trainers.Prepared):
    def __call__(self, shard: dict[str, Tensor]) -> None:
        self.schedule.step()
        loss(self.ddp, shard).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def test_what_torch_has_against_the_order_of_the_calls_is_told() -> None:
    verdict = check(
        own_case(),
        SchedulesFirst,
        compare="update",
        optimizer=momentum_with_schedule,
        steps=STEPS,
    )
    text = " ".join(str(verdict).split())
    assert "in step 1 lr is 0.05, and 0.1 in the reference" in text
    warned = "Detected call of `lr_scheduler.step()` before `optimizer.step()`. "
    assert re.search(rf"torch warns of line \d+: {re.escape(warned)}", text), text


class SteppedInGroups(own_trainers.Trainer):
    """Weight decay is left out of the biases, and is there in the reference."""

    def before_step(self, step: int, optimizer: torch.optim.Optimizer) -> None:
        (group,) = optimizer.param_groups[:1]
        biases = [one for one in group["params"] if one.ndim == 1]
        if len(optimizer.param_groups) == 1:
            group["params"] = [one for one in group["params"] if one.ndim > 1]
            optimizer.add_param_group({"params": biases, "weight_decay": 0.0})


class MovesTheMomentum(own_trainers.Trainer):
    def before_step(self, step: int, optimizer: torch.optim.Optimizer) -> None:
        for state in optimizer.state.values():
            state["exp_avg"] *= 2


def test_settings_of_some_parameters_are_told_with_their_names() -> None:
    wrong = judged(SteppedInGroups()).wrong_step
    assert wrong is not None
    what = "weight_decay is 0, and 0.1 in the reference"
    assert wrong.settings == ((what, ("0.bias", "2.bias")),)
    assert wrong.headline == f"in step 1 {what}"
    assert f"{what} (of 0.bias, 2.bias)" in wrong.sentence


def test_equal_settings_are_told_as_well() -> None:
    wrong = judged(MovesTheMomentum()).wrong_step
    assert wrong is not None
    assert (wrong.number, wrong.differs, wrong.settings) == (2, "weights", ())
    assert "the settings of the optimizer are those of the reference" in wrong.sentence


def test_another_number_of_steps_is_told_and_gets_no_cause() -> None:
    verdict = judged(own_trainers.StepsTwice())
    assert (verdict.outcome, verdict.cause) == ("different", None)
    assert verdict.wrong_step is not None
    assert verdict.wrong_step.differs == "count"
    assert (verdict.wrong_step.made, verdict.wrong_step.expected) == ((4, 4), 3)


def test_ranks_that_make_different_numbers_of_steps_are_told_by_number() -> None:
    wrong = WrongStep(None, "count", (1, 3, 3), 3)
    assert wrong.headline == "the ranks make different numbers of optimizer steps"
    each = "1 on rank 0, 3 on ranks 1, 2"
    assert wrong.sentence == (
        f"The optimizer makes different numbers of steps: {each}. The reference makes 3."
    )


def test_weights_that_change_after_the_last_step_are_told() -> None:
    verdict = judged(own_trainers.ChangesWeightsAtTheEnd())
    assert verdict.wrong_step is not None
    assert verdict.wrong_step.differs == "afterwards"


def test_a_trainer_that_never_steps_is_named() -> None:
    verdict = judged(own_trainers.NeverSteps())
    assert verdict.cause == "no_optimizer_step"
    assert "loss(DistributedDataParallel(model), shard).backward()" in str(verdict)


class Pair(nn.Module):
    """A generator and a critic."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = nn.Linear(5, 3), nn.Linear(3, 1)


class Adversarial:
    """One step of a generator and its critic, wrapped or not."""

    times = 1.0

    def __init__(self, model: Any, rank: Rank | None = None) -> None:
        wrap: Callable[[Any], nn.Module] = (
            DistributedDataParallel if rank is not None else nn.Sequential
        )
        self.generator, self.critic = wrap(model.generator), wrap(model.critic)
        self.optimizers = [
            torch.optim.Adam(one.parameters()) for one in (model.generator, model.critic)
        ]

    def __call__(self, shard: dict[str, Tensor]) -> None:
        generator, critic = self.optimizers
        critic.zero_grad()
        fake = self.generator(shard["rows"])
        real = F.softplus(-self.critic(shard["targets"])).mean()
        (real + self.times * F.softplus(self.critic(fake.detach())).mean()).backward()
        critic.step()
        generator.zero_grad()
        F.softplus(-self.critic(self.generator(shard["rows"]))).mean().backward()
        generator.step()


class WronglyAdversarial(Adversarial):
    times = 2.0


def adversarial_reference(model: Any) -> Adversarial:
    return Adversarial(model)


def test_a_reference_of_the_users_own_needs_no_loss() -> None:
    case = Case(model=Pair, batch=make_batch, layout="1x2")
    options: Any = {"compare": "update", "reference": adversarial_reference, "steps": 2}
    verdict = check(case, Adversarial, **options)
    assert verdict.outcome == "same"
    assert "your own reference=" in str(verdict)
    wrong = check(
        case, WronglyAdversarial, compare="update", reference=adversarial_reference, steps=2
    )
    assert (wrong.outcome, wrong.cause) == ("different", None)
    assert wrong.wrong_step is not None
    assert (wrong.wrong_step.number, wrong.wrong_step.differs) == (1, "gradients")
    assert wrong.wrong_step.expected == 4  # the critic's and the generator's, in both steps


def draws(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> dict[str, Tensor]:
    return {"0.bias": torch.rand(7, dtype=torch.float64)}


@pytest.mark.parametrize(("seeds", "alike"), [("apart", False), ("alike", True), (None, False)])
def test_ranks_are_seeded_apart_unless_they_are_to_be_alike(seeds: Any, alike: bool) -> None:
    verdict = check(own_case(), draws, seeds=seeds)
    assert verdict.comparison is not None
    (bias,) = [one for one in verdict.comparison.parameters if one.name == "0.bias"]
    assert bias.ranks_agree is alike


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"optimizer": torch.optim.AdamW}, r"lambda params: AdamW\(params, lr=...\)"),
        ({"optimizer": 3}, "optimizer is 3; it should be a function of the parameters"),
        ({"optimizer": lambda parameters: 3}, "schedulers; not int"),
        ({"clip": -1.0}, "clip is -1.0; it should be a number above 0"),
        ({"reference": "alone"}, "reference is 'alone'; it should be a function"),
        ({"reference": lambda: None}, r"a function \(model, batch\)"),
        ({"optimizer": adamw, "lr": 0.1}, "the learning rate is that of optimizer="),
        (
            {"optimizer": adamw, "compare": "gradients"},
            'compare is .gradients.; it should be "update"',
        ),
        ({"seeds": "same"}, "seeds is 'same'; it should be one of apart, alike"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_training_that_cannot_be_right_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(BadCase, match=says):
        judged(own_trainers.Trainer(), **({"optimizer": None, "clip": None} | options))


def test_a_case_without_a_loss_needs_a_reference() -> None:
    with pytest.raises(BadCase, match="only with reference= none is needed"):
        check(Case(model=build_model, batch=make_batch), own_trainers.Prepared)


def returns_nothing(model: nn.Module, rank: Rank) -> None: ...


def test_a_prepared_step_must_be_returned() -> None:
    with pytest.raises(Exception, match=r"must return\s+a step, a function of the shard"):
        assert_equivalent(own_case(), returns_nothing)  # type: ignore[arg-type]


def with_dropout() -> nn.Module:
    return nn.Sequential(build_model(), nn.Dropout(0.5), nn.Linear(3, 3))


@pytest.mark.parametrize(
    ("step", "options"),
    [
        (own_trainers.Trainer(), AS_TRAINER),
        (own_trainers.Prepared, {"compare": "update", "steps": STEPS}),
        (right_step, {"steps": STEPS}),
    ],
    ids=["trainer", "prepared", "gradients"],
)
def test_several_steps_with_dropout_are_compared_without_it(
    step: Any, options: dict[str, Any]
) -> None:
    if step is own_trainers.Prepared:
        options = options | {"optimizer": momentum_with_schedule}
    verdict = check(own_case(model=with_dropout), step, **options)
    assert (verdict.outcome, verdict.cause) == ("same", None), str(verdict)
    assert "Without dropout: this is how the step was compared" in " ".join(str(verdict).split())


class InFloat32:
    """Computes in float32 inside float64; Adam's first step leaves little of the rounding."""

    times = 1.0

    def __call__(self, model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
        ddp = DistributedDataParallel(model)
        optimizer = adamw(list(ddp.parameters()))
        outputs = ddp(shard["rows"]).float()
        (self.times * F.mse_loss(outputs, shard["targets"].float())).backward()
        optimizer.step()


class TwiceInFloat32(InFloat32):
    times = 2.0


def test_rounding_in_float32_is_recognised_by_the_gradients_where_adam_hides_its_size() -> None:
    options: Any = {"compare": "update", "optimizer": adamw}
    right = check(own_case(), InFloat32(), **options)
    assert right.outcome == "same"
    assert right.again.other_precision is not None
    assert right.again.other_precision.outcome == "different"
    assert check(own_case(), TwiceInFloat32(), **options).outcome == "different"


def test_a_loss_as_large_as_a_sum_of_eight_examples_is_no_loss_scale() -> None:
    def summed(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
        wrapped = DistributedDataParallel(model)
        (len(shard["rows"]) * loss(wrapped, shard)).backward()

    def batch_of_16(generator: torch.Generator) -> dict[str, Tensor]:
        rows = torch.randn(16, 5, generator=generator)
        return {"rows": rows, "targets": torch.randn(16, 3, generator=generator)}

    verdict = check(own_case(batch=batch_of_16), summed)
    assert verdict.cause == "local_loss_summed"


def test_a_loss_summed_over_each_micro_batch_and_divided_by_their_number_is_named() -> None:
    def accumulates(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
        wrapped = DistributedDataParallel(model)
        first, second = ({name: leaf[start::2] for name, leaf in shard.items()} for start in (0, 1))
        with wrapped.no_sync():
            (len(first["rows"]) * loss(wrapped, first) / 2).backward()
        (len(second["rows"]) * loss(wrapped, second) / 2).backward()

    verdict = check(own_case(), accumulates)
    assert verdict.cause == "local_loss_summed"
    assert "12 / 2 / 2 (examples / ranks / micro-batches)" in verdict.full_report()


class AveragesInAHook:
    """The optimizer's own hook reduces the gradients when it is about to step."""

    left_out = 0

    def __init__(self, model: nn.Module, rank: Rank) -> None:
        self.model = model
        self.optimizer = adamw(list(model.parameters()))
        self.optimizer.register_step_pre_hook(self.average)

    def average(self, *_: Any) -> None:
        every = list(self.model.parameters())
        for parameter in every[self.left_out :]:
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)
            assert parameter.grad is not None
            parameter.grad /= dist.get_world_size()

    def __call__(self, shard: dict[str, Tensor]) -> None:
        self.optimizer.zero_grad()
        loss(self.model, shard).backward()
        self.optimizer.step()


class LeavesOneOutInAHook(AveragesInAHook):
    left_out = 1


@pytest.mark.parametrize("steps", [1, 2])
def test_gradients_are_those_that_hooks_of_the_optimizer_leave(steps: int) -> None:
    options: Any = {"compare": "update", "optimizer": adamw, "steps": steps}
    assert check(own_case(), AveragesInAHook, **options).outcome == "same"
    verdict = check(own_case(), LeavesOneOutInAHook, **options)
    assert verdict.cause == "parameter_not_reduced", str(verdict)
    assert "1 of 4 parameters differs" in " ".join(str(verdict).split())


class HalvesWhatItHasClipped(own_trainers.Trainer):
    def before_step(self, step: int, optimizer: torch.optim.Optimizer) -> None:
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad *= 0.5


def test_what_is_changed_after_clipping_is_held_against_the_clipped_big_batch() -> None:
    text = " ".join(str(judged(HalvesWhatItHasClipped())).split())
    assert "should count 1.00 1.00" in text
    assert "every rank holds 0.50 0.50" in text
    assert "error 0.5," in text


def joins_uneven_streams(model: Any, batch: Any, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    streams = [[slice(0, 3), slice(6, 12)], [slice(3, 6)]]
    with ddp.join():
        for rows in streams[rank.rank]:
            optimizer.zero_grad()
            loss(ddp, {name: leaf[rows] for name, leaf in batch.items()}).backward()
            optimizer.step()


def test_a_join_that_divides_by_ranks_that_have_ended_is_marked() -> None:
    options: Any = {"compare": "update", "steps": (6, 6), "lr": 0.1}
    verdict = check(own_case(shards="own"), joins_uneven_streams, **options)
    assert verdict.wrong_step is not None, str(verdict)
    assert verdict.wrong_step.made == (2, 1)
    (marked,) = [one for one in pointed_lines(verdict) if one.is_fault]
    assert marked.line.number == joins_uneven_streams.__code__.co_firstlineno + 4
    assert "divide_by_initial_world_size=False" in marked.note
