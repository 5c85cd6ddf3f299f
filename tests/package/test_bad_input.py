"""Bad input is refused with the field, the value and what would be right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddp_equivalence import BadCase, Case, check
from ddp_equivalence.case import settings
from ddp_equivalence.ranks.lanes import missing
from ddp_equivalence.ranks.warm_ranks import warm_ranks
from tests.package.own_cases import own_case, right_step


def raises() -> nn.Module:
    raise RuntimeError("no weights here")


def not_a_model() -> Any:
    return 3


def frozen() -> nn.Module:
    return nn.Linear(5, 3).requires_grad_(False)


def loss_raises(model: nn.Module, batch: Any) -> Tensor:
    return batch["colour"]  # type: ignore[no-any-return]


def loss_vector(model: nn.Module, batch: Any) -> Tensor:
    return model(batch["rows"]).sum(1)  # type: ignore[no-any-return]


def loss_without_graph(model: nn.Module, batch: Any) -> Tensor:
    return model(batch["rows"]).sum().detach()  # type: ignore[no-any-return]


def loss_number(model: nn.Module, batch: Any) -> Any:
    return model(batch["rows"]).sum().item()


def loss_in_float32(model: nn.Module, batch: Any) -> Tensor:
    return (model(batch["rows"]) @ torch.ones(3)).sum()  # type: ignore[no-any-return]


def leaves_disagree(generator: torch.Generator) -> Any:
    return {"rows": torch.randn(12, 5), "targets": torch.randn(11, 3)}


def leaf_without_examples(generator: torch.Generator) -> Any:
    return {"rows": torch.randn(12, 5), "scale": torch.tensor(2.0)}


def no_tensor(generator: torch.Generator) -> Any:
    return {"rows": [1, 2, 3]}


def batch_raises(generator: torch.Generator) -> Any:
    raise FileNotFoundError("train.csv")


@pytest.mark.parametrize(
    ("changes", "field", "says"),
    [
        ({"model": raises}, "model", "raises.*it raised RuntimeError: no weights here"),
        ({"model": not_a_model}, "model", "returns an nn.Module, not int"),
        ({"model": frozen}, "model", "at least one parameter that requires a gradient"),
        ({"loss": loss_raises}, "loss", "it raised KeyError: 'colour'"),
        ({"loss": loss_vector}, "loss", r"a scalar tensor, not one of shape \(12,\)"),
        ({"loss": loss_without_graph}, "loss", "requires no gradient"),
        ({"loss": loss_number}, "loss", "a scalar tensor, not float"),
        ({"loss": loss_in_float32}, "loss", "the case is checked in float64"),
        ({"batch": leaves_disagree}, "batch", r"rows.*12.*targets.*11.*equally many"),
        ({"batch": leaf_without_examples}, "batch", "scale.*examples along dim 0"),
        ({"batch": no_tensor}, "batch", "at least one tensor"),
        ({"batch": batch_raises}, "batch", "it raised FileNotFoundError: train.csv"),
        ({"shards": "5+3"}, "shards", "add up to the 12 examples of the batch, not 8"),
        ({"layout": "5x1"}, "shards", "a multiple of the 5 ranks"),
    ],
)
def test_what_a_builder_does_wrong_is_a_bad_case(
    changes: dict[str, Any], field: str, says: str
) -> None:
    case = own_case(**changes)
    with pytest.raises(BadCase, match=says) as caught:
        check(case, right_step)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("changes", "field", "says"),
    [
        ({"dtype": torch.int64}, "dtype", "a floating-point torch.dtype"),
        ({"seed": -1}, "seed", "an integer from 0"),
        ({"seed": 1.5}, "seed", "an integer from 0"),
        ({"model": "mlpp"}, "model", "a function, or one of linear"),
        ({"model": 7}, "model", "a function, or one of linear"),
        ({"loss": "l1"}, "loss", "a function, or one of mse_mean"),
        ({"batch": None}, "batch", "since model or loss is your own"),
        ({"batch": torch.ones(3)}, "batch", "a function"),
        ({"examples": 8}, "examples", "your batch function sets the size"),
    ],
)
def test_a_field_that_cannot_be_right_is_refused_at_once(
    changes: dict[str, Any], field: str, says: str
) -> None:
    with pytest.raises(BadCase, match=says) as caught:
        own_case(**changes)
    assert caught.value.field == field
    assert field in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"step": "ddp_men"}, "step"),
        ({"step": 3}, "step"),
        ({"compare": "weights"}, "compare"),
        ({"lr": 0}, "lr"),
        ({"steps": 5}, "steps"),
        ({"steps": 0}, "steps"),
        ({"steps": (6, 5)}, "steps"),
        ({"deadline": 0}, "deadline"),
        ({"deadline": "1m"}, "deadline"),
        ({"backend": "mpi"}, "backend"),
        ({"case": "mlp"}, "case"),
    ],
)
def test_an_argument_of_check_that_cannot_be_right_is_refused(
    arguments: dict[str, Any], field: str
) -> None:
    defaults: dict[str, Any] = {"case": own_case(), "step": right_step}
    with pytest.raises(BadCase) as caught:
        check(**(defaults | arguments))
    assert caught.value.field == field


def test_a_loss_that_does_not_fit_the_model_is_refused() -> None:
    with pytest.raises(BadCase, match="a loss for 'vector' output, which mlp returns"):
        Case(model="mlp", loss="token_mean")


def test_more_ranks_than_gpus_are_refused_with_both_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ddp_equivalence.ranks.lanes.cuda_devices", lambda: ("0", "1"))
    with pytest.raises(BadCase, match=r"needs 4 CUDA devices \(one rank each\), found 2") as caught:
        check(own_case(layout="2x2"), right_step, backend="nccl")
    assert caught.value.field == "backend"
    assert missing("data_parallel", 2) is None
    assert missing("data_parallel", 4) == "needs 4 CUDA devices, found 2"
    monkeypatch.setenv("NCCL_HOSTID", "one")  # ranks cannot share the GPUs
    for lane in ("nccl", "nccl_shared"):
        must_run = settings.using(settings.Settings(must_run=(lane,)))
        with must_run, pytest.raises(BadCase, match=r"needs 4 .* allows no fall back") as caught:
            check(own_case(layout="2x2"), right_step)
        assert (caught.value.field, caught.value.value) == ("layout", "2x2")


def test_a_strategy_of_one_process_needs_one_node() -> None:
    with pytest.raises(BadCase, match="one node, such as '1x4'"):
        check(own_case(layout="2x2"), "emulated_data_parallel")


def test_a_strategy_that_must_know_the_normaliser_says_so() -> None:
    with pytest.raises(BadCase, match="ddp_global_mean needs to know what the loss divides by"):
        check(own_case(), "ddp_global_mean")


def test_a_function_that_cannot_travel_is_refused() -> None:
    lock = __import__("threading").Lock()

    def step(model: nn.Module, shard: Any, rank: Any) -> None:
        lock.acquire()

    with pytest.raises(BadCase, match="cloudpickle can carry to the ranks") as caught:
        check(own_case(), step)
    assert caught.value.field == "step"


def test_a_bad_argument_is_found_before_any_rank_is_asked() -> None:
    """Nothing is lost: the same ranks go on."""
    assert check(own_case(), right_step).outcome == "same"
    started = warm_ranks().started
    with pytest.raises(BadCase):
        check(own_case(), right_step, deadline=-1)
    assert check(own_case(), right_step).outcome == "same"
    assert warm_ranks().started == started


def test_a_bad_builder_costs_no_more_than_its_ranks() -> None:
    """They are at work by the time that the reference finds out."""
    with pytest.raises(BadCase):
        check(own_case(loss=loss_vector), right_step)
    assert check(own_case(), right_step).outcome == "same"
