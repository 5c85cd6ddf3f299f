"""Bad input is refused with the field, the value, and how to write what was probably meant."""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ddp_equivalence import BadCase, Case, Rank, check
from ddp_equivalence.case import settings
from ddp_equivalence.commands.explain import explain
from ddp_equivalence.ranks.lanes import missing
from ddp_equivalence.ranks.warm_ranks import warm_ranks
from ddp_equivalence.report.script import export
from tests.package.own_cases import loss, make_batch, own_case, right_step


def without_address(value: object) -> str:
    """The same text in every process, as xdist needs it."""
    text = re.sub(r"tensor\(.*\)", "tensor", str(value), flags=re.DOTALL)
    return re.sub(r" at 0x\w+", "", text)


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
        ({"model": lambda size: None}, "model", r"\(\) -> nn.Module; it raised TypeError"),
        ({"batch": lambda: None}, "batch", r"\(torch.Generator\) -> pytree of tensors; it raised"),
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
    ("changes", "says"),
    [
        ({"shards": [6, 6]}, r'shards is \[6, 6\]; it should be text: shards="6\+6"'),
        ({"shards": 6}, r'examples per rank such as "5\+3"'),
        ({"layout": (2, 2)}, 'text: layout="2x2"'),
        ({"layout": 2}, 'text: layout="1x2" for 2 ranks on one node'),
        ({"dtype": "float32"}, "torch.float32, without quotes"),
        ({"dtype": "torch.bfloat16"}, "torch.bfloat16, without quotes"),
        ({"dtype": "quick"}, "a floating-point torch.dtype"),
        ({"dtype": torch.int64}, "a floating-point torch.dtype"),
        ({"seed": -1}, "an integer from 0"),
        ({"seed": 1.0}, "an integer from 0"),
        ({"seed": True}, "an integer from 0"),
        ({"exact": "yes"}, "True or False"),
        ({"examples": 8}, "your batch function sets the size"),
        ({"model": "mlpp"}, "a function, or one of linear"),
        ({"model": 7}, "a function, or one of linear"),
        (
            {"model": nn.Linear(5, 3)},
            r"model is 'Linear'; it should be .* model=lambda: Linear\(\.\.\.\)",
        ),
        ({"batch": None}, "for your model or loss"),
        (
            {"batch": torch.randn(600, 500)},
            r"batch is of type Tensor; .* batch=lambda generator: \.\.\.",
        ),
        (
            {"batch": {"rows": torch.randn(12, 5)}},
            r"batch is of type dict; .* batch=lambda generator:",
        ),
        ({"loss": "l1"}, "a function, or one of mse_mean"),
        (
            {"loss": nn.MSELoss()},
            r"loss is 'MSELoss'; .* loss=lambda model, batch: MSELoss\(\)\(model\(.*\), .*\)",
        ),
        ({"loss": nn.MSELoss}, r"loss=lambda model, batch: MSELoss\(\)\(model\("),
        ({"loss": nn.functional.mse_loss}, r"loss=lambda model, batch: mse_loss\(model\("),
    ],
    ids=without_address,
)
def test_a_field_that_cannot_be_right_is_told_how_to_write_it(
    changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(BadCase, match=says) as caught:
        own_case(**changes)
    assert caught.value.field in changes
    assert caught.value.field in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"case": "mlp"}, ""),
        ({"step": "ddp_men"}, ""),
        ({"step": 3}, ""),
        ({"compare": "weights"}, ""),
        ({"lr": 0}, "a learning rate above 0"),
        ({"lr": "0.1"}, "a learning rate above 0"),
        ({"steps": 5}, ""),
        ({"steps": 0}, "at least 1 big batch"),
        ({"steps": 2.0}, "at least 1 big batch"),
        ({"steps": (6, 5)}, ""),
        ({"steps": [6, 6]}, r"or the tuple \(6, 6\)"),
        ({"deadline": 0}, ""),
        ({"deadline": "1m"}, ""),
        ({"backend": "mpi"}, ""),
        ({"allow_changes": "no"}, "True or False"),
        ({"fresh_ranks": "no"}, "True or False"),
        ({"in_process": 0}, "True or False"),
    ],
    ids=without_address,
)
def test_an_argument_of_check_that_cannot_be_right_is_told_what_is_right(
    arguments: dict[str, Any], says: str
) -> None:
    defaults: dict[str, Any] = {"case": own_case(), "step": right_step}
    with pytest.raises(BadCase) as caught:
        check(**(defaults | arguments))
    assert re.search(says, str(caught.value))
    assert caught.value.field in arguments


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
    lock = threading.Lock()

    def step(model: nn.Module, shard: Any, rank: Any) -> None:
        lock.acquire()

    with pytest.raises(BadCase, match="cloudpickle can carry to the ranks") as caught:
        check(own_case(), step)
    assert caught.value.field == "step"


@pytest.mark.usefixtures("as_if_alone")
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


def test_integers_of_numpy_are_integers() -> None:
    case = own_case(seed=np.int64(3))
    assert case == own_case(seed=3)
    assert str(case).endswith("seed3")
    assert Case(model="mlp", loss="mse_mean", examples=np.int32(8)).catalogue_examples == 8  # type: ignore[arg-type]
    two_steps = np.int64(2)
    assert check(own_case(), right_step, steps=two_steps, lr=np.float32(0.1)).outcome == "same"  # type: ignore[arg-type]
    sizes = (np.int64(4), np.int64(8))
    assert check(own_case(), right_step, steps=sizes).outcome == "same"  # type: ignore[arg-type]


def test_a_field_of_the_case_that_is_given_to_check_is_told_where_it_belongs() -> None:
    with pytest.raises(TypeError, match=r"layout is a field of the case: Case\(layout=\.\.\.\)"):
        check(own_case(), right_step, layout="2x2")  # type: ignore[call-arg]


def test_swapped_arguments_are_told_their_order() -> None:
    with pytest.raises(BadCase, match=r"check\(case, step\), in this order"):
        check(right_step, own_case())  # type: ignore[arg-type]


def two(model: nn.Module, shard: Any) -> None:
    pass


def four(model: nn.Module, shard: Any, rank: Rank, config: Any) -> None:
    pass


def named(model: nn.Module, *, shard: Any, rank: Rank) -> None:
    pass


async def awaited(model: nn.Module, shard: Any, rank: Rank) -> None:
    pass


def generator(model: nn.Module, shard: Any, rank: Rank) -> Iterator[int]:
    yield 1


class Callback:
    def __call__(self, model: nn.Module) -> None:
        pass

    def method(self, model: nn.Module, shard: Any) -> None:
        pass


@pytest.mark.parametrize(
    ("step", "says"),
    [
        (
            two,
            r"step is 'two'; it should be a function .* takes \(model, shard\)",
        ),
        (four, r"takes \(model, shard, rank, config\)"),
        (named, r"takes \(model, \*, shard, rank\)"),
        (functools.partial(right_step, nn.Linear(5, 3)), r"takes \(shard, rank\)"),
        (Callback(), r"takes \(model\)"),
        (Callback().method, r"takes \(model, shard\)"),
        (awaited, "; this one is a coroutine"),
        (generator, "; this one is a generator"),
    ],
    ids=["two", "four", "named", "partial", "object", "method", "coroutine", "generator"],
)
def test_a_step_with_the_wrong_signature_is_refused_before_any_rank_starts(
    step: Any, says: str
) -> None:
    started = warm_ranks().started
    with pytest.raises(BadCase, match=says) as caught:
        check(own_case(layout="1x3"), step)
    assert caught.value.field == "step"
    assert warm_ranks().started == started


def gives_a_config(function: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(function)
    def with_config(*arguments: Any) -> None:
        return function(*arguments, {})

    return with_config


@gives_a_config
def decorated(model: nn.Module, shard: Any, rank: Rank, config: Any) -> None:
    right_step(model, shard, rank)


def with_default(model: nn.Module, shard: Any, rank: Rank, scale: float = 1.0) -> None:
    right_step(model, shard, rank)


def any_arguments(*arguments: Any, **named: Any) -> None:
    right_step(*arguments, **named)


class Trainer:
    def __call__(self, model: nn.Module, shard: Any, rank: Rank) -> None:
        right_step(model, shard, rank)

    def fit(self, model: nn.Module, shard: Any, rank: Rank) -> None:
        right_step(model, shard, rank)


class WithoutSignature(Trainer):
    __signature__ = "none that inspect can read"


@pytest.mark.parametrize(
    "step",
    [
        decorated,
        with_default,
        any_arguments,
        functools.partial(with_default, scale=2.0),
        Trainer(),
        Trainer().fit,
        WithoutSignature(),
    ],
    ids=["decorated", "default", "*args", "partial", "object", "method", "no signature"],
)
def test_a_step_that_can_take_three_arguments_is_called(step: Any) -> None:
    assert check(own_case(), step).outcome == "same"


def in_float32(model: nn.Module, shard: Any, rank: Rank) -> None:
    loss(model, {**shard, "rows": shard["rows"] @ torch.eye(5)}).backward()


def step_whose_loss_is_in_float32(model: nn.Module, shard: Any, rank: Rank) -> None:
    (model(shard["rows"]) @ torch.ones(3)).sum().backward()


def layer_in_float32(model: nn.Module, shard: Any, rank: Rank) -> None:
    nn.Linear(5, 3)(shard["rows"]).sum().backward()


def assigned_in_float32(model: nn.Module, shard: Any, rank: Rank) -> None:
    torch.zeros(12, 5)[torch.arange(len(shard["rows"]))] = shard["rows"]


def convolved_in_float32(model: nn.Module, shard: Any, rank: Rank) -> None:
    nn.Conv1d(1, 1, 3)(shard["rows"][:, None]).sum().backward()


@pytest.mark.parametrize(
    "step",
    [
        in_float32,
        step_whose_loss_is_in_float32,
        layer_in_float32,
        assigned_in_float32,
        convolved_in_float32,
    ],
)
def test_a_dtype_that_clashes_on_a_rank_has_a_hint(step: Any) -> None:
    report = " ".join(str(check(own_case(), step)).split())
    assert (
        "Hint: the case casts the model and the floats of the batch to its dtype, float64 by "
        "default. Give constants the dtype of the input, or choose Case(dtype=torch.float32)."
    ) in report


@pytest.mark.parametrize(
    ("directory", "name", "field"),
    [("/proc/no/such", "", "directory"), (None, "", "directory"), ("out", "a/b", "name")],
)
def test_a_script_that_has_no_place_is_a_bad_case(
    directory: Any, name: str, field: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadCase) as caught:
        export(own_case(), right_step, directory, name=name)
    assert caught.value.field == field
    assert not list(tmp_path.iterdir())


def test_explain_is_told_that_it_takes_a_setup() -> None:
    with pytest.raises(
        BadCase, match=r"setup is \{'batch': 4\}; it should be a Setup, such as Setup\(batch=4\)"
    ):
        explain({"batch": 4})  # type: ignore[arg-type]


def raises_another(model: nn.Module, shard: Any, rank: Rank) -> None:
    raise ValueError("oh")


def test_another_error_has_no_hint() -> None:
    assert "Hint" not in str(check(own_case(), raises_another))


@pytest.mark.parametrize("shards", ["equal", "uneven", "one_example", "empty", "own"])
def test_a_batch_without_examples_is_refused(shards: str) -> None:
    def empty(generator: torch.Generator) -> dict[str, Tensor]:
        return {name: leaf[:0] for name, leaf in make_batch(generator).items()}

    with pytest.raises(BadCase, match="at least one example; all its tensors have length 0") as bad:
        check(own_case(batch=empty, shards=shards), right_step)
    assert bad.value.field == "batch"


def test_fewer_examples_than_ranks_are_told_how_to_be_split() -> None:
    def three(generator: torch.Generator) -> dict[str, Tensor]:
        return {name: leaf[:3] for name, leaf in make_batch(generator).items()}

    with pytest.raises(BadCase, match="a multiple of the 4 ranks"):
        check(own_case(batch=three, layout="1x4"), right_step)
