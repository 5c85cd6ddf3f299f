"""Bad input that is close to good input: the error says how to write what was probably meant."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ddp_equivalence import BadCase, Case, Rank, check
from ddp_equivalence.commands.explain import explain
from ddp_equivalence.ranks.warm_ranks import warm_ranks
from ddp_equivalence.report.script import export
from tests.package.own_cases import loss, make_batch, own_case, right_step


def without_address(value: object) -> str:
    """The same text in every process, as xdist needs it."""
    text = re.sub(r"tensor\(.*\)", "tensor", str(value), flags=re.DOTALL)
    return re.sub(r" at 0x\w+", "", text)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"shards": [6, 6]}, r'shards = \[6, 6\]: text: shards="6\+6"'),
        ({"shards": (6, 6)}, r'text: shards="6\+6"'),
        ({"shards": 6}, r'examples per rank such as "5\+3"'),
        ({"layout": (2, 2)}, 'text: layout="2x2"'),
        ({"layout": [1, 3]}, 'text: layout="1x3"'),
        ({"layout": 2}, 'text: layout="1x2" for 2 ranks on one node'),
        ({"dtype": "float32"}, "torch.float32, without quotes"),
        ({"dtype": "torch.bfloat16"}, "torch.bfloat16, without quotes"),
        ({"dtype": "quick"}, "a floating-point torch.dtype"),
        ({"seed": 1.0}, "an integer from 0"),
        ({"seed": True}, "an integer from 0"),
        ({"exact": "yes"}, "True or False"),
        ({"model": nn.Linear(5, 3)}, r"model = 'Linear': .* model=lambda: Linear\(\.\.\.\)"),
        ({"batch": torch.randn(600, 500)}, r"batch = 'Tensor': .* batch=lambda generator: \.\.\."),
        ({"batch": {"rows": torch.randn(12, 5)}}, r"batch = 'dict': .* batch=lambda generator:"),
        (
            {"loss": nn.MSELoss()},
            r"loss = 'MSELoss': .* loss=lambda model, batch: MSELoss\(\)\(model\(.*\), .*\)",
        ),
        ({"loss": nn.MSELoss}, r"loss=lambda model, batch: MSELoss\(\)\(model\("),
        ({"loss": nn.functional.mse_loss}, r"loss=lambda model, batch: mse_loss\(model\("),
    ],
    ids=without_address,
)
def test_a_field_of_the_wrong_type_is_told_how_to_write_it(
    changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(BadCase, match=says) as caught:
        own_case(**changes)
    assert caught.value.field in changes
    assert len(str(caught.value)) < 400


def test_integers_of_numpy_are_integers() -> None:
    case = own_case(seed=np.int64(3))
    assert case == own_case(seed=3)
    assert str(case).endswith("seed3")
    assert Case(model="mlp", loss="mse_mean", examples=np.int32(8)).catalogue_examples == 8  # type: ignore[arg-type]
    two_steps = np.int64(2)
    assert check(own_case(), right_step, steps=two_steps, lr=np.float32(0.1)).outcome == "same"  # type: ignore[arg-type]
    sizes = (np.int64(4), np.int64(8))
    assert check(own_case(), right_step, steps=sizes).outcome == "same"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"steps": [6, 6]}, r"or the tuple \(6, 6\)"),
        ({"steps": 2.0}, "at least 1 big batch"),
        ({"allow_changes": "no"}, "True or False"),
        ({"fresh_ranks": "no"}, "True or False"),
        ({"in_process": 0}, "True or False"),
        ({"lr": "0.1"}, "a learning rate above 0"),
    ],
    ids=without_address,
)
def test_an_option_of_the_wrong_type_is_told_what_is_right(
    options: dict[str, Any], says: str
) -> None:
    with pytest.raises(BadCase, match=says) as caught:
        check(own_case(), right_step, **options)
    assert caught.value.field in options


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
        (two, r"step = 'two': a function \(model, shard, rank\), or .* takes \(model, shard\)"),
        (four, r"takes \(model, shard, rank, config\)"),
        (named, r"takes \(model, \*, shard, rank\)"),
        (functools.partial(right_step, nn.Linear(5, 3)), r"takes \(shard, rank\)"),
        (Callback(), r"takes \(model\)"),
        (Callback().method, r"takes \(model, shard\)"),
        (awaited, "a plain function; this one is a coroutine"),
        (generator, "a plain function; this one is a generator"),
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


def loss_in_float32(model: nn.Module, shard: Any, rank: Rank) -> None:
    (model(shard["rows"]) @ torch.ones(3)).sum().backward()


def layer_in_float32(model: nn.Module, shard: Any, rank: Rank) -> None:
    nn.Linear(5, 3)(shard["rows"]).sum().backward()


def assigned_in_float32(model: nn.Module, shard: Any, rank: Rank) -> None:
    torch.zeros(12, 5)[torch.arange(len(shard["rows"]))] = shard["rows"]


def convolved_in_float32(model: nn.Module, shard: Any, rank: Rank) -> None:
    nn.Conv1d(1, 1, 3)(shard["rows"][:, None]).sum().backward()


@pytest.mark.parametrize(
    "step",
    [in_float32, loss_in_float32, layer_in_float32, assigned_in_float32, convolved_in_float32],
)
def test_a_dtype_that_clashes_on_a_rank_has_a_hint(step: Any) -> None:
    report = " ".join(str(check(own_case(), step)).split())
    assert (
        "Hint: the case casts the model and the floats of the batch to its dtype, float64 by "
        "default. Give constants the dtype of the input, or choose Case(dtype=torch.float32)."
    ) in report


def returns_its_loss(model: nn.Module, shard: Any, rank: Rank) -> Any:
    return loss(model, shard)


def test_a_step_that_returns_its_loss_is_told_what_a_step_returns() -> None:
    report = " ".join(str(check(own_case(), returns_its_loss)).split())
    assert "returned a tensor of shape (). A step returns None and leaves its gradients" in report


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
    with pytest.raises(BadCase, match=r"setup = \{'batch': 4\}: a Setup, such as Setup\(batch=4\)"):
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


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"batch": lambda: None},
            r"a function \(torch.Generator\) -> pytree of tensors; it raised",
        ),
        ({"model": lambda size: None}, r"a function \(\) -> nn.Module; it raised TypeError"),
    ],
    ids=["batch", "model"],
)
def test_a_builder_with_the_wrong_signature_is_told_the_right_one(
    changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(BadCase, match=says):
        check(own_case(**changes), right_step)
