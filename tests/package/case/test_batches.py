"""Batches of all kinds are dealt as the case says; what is not clear is refused by name."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import BadCase, Case, Rank, check
from ddp_equivalence.case.batch import check_that_it_is_clear
from ddp_equivalence.case.build import with_examples
from ddp_equivalence.comparison.gradients import sgd_step
from ddp_equivalence.faults.plant import planted
from tests.package.case.batches import (
    KINDS,
    NAMES,
    BatchOfKind,
    Circle,
    N,
    Pair,
    examples_along_dim_1,
    images_of_many_sizes,
    lengths_of_names,
    loss_along_dim_1,
    loss_of_any_kind,
    loss_of_images,
    loss_of_names,
    rows_and_targets,
    with_more,
)
from tests.package.own_cases import loss, make_batch, own_case, right_step

OPTIONS: list[dict[str, Any]] = [{}, {"steps": 2}, {"compare": "update", "steps": 2, "lr": 0.05}]


def in_turn(names: Any) -> pytest.MarkDecorator:
    """Each name with the next of the options."""
    return pytest.mark.parametrize(("name", "options"), list(zip(names, cycle(OPTIONS))), ids=str)


def step_of(case: Case, options: dict[str, Any], factor: float = 1.0) -> Any:
    """Plain DDP with the case's loss; for updates, a trainer that takes the steps itself."""
    steps = options.get("steps", 1)

    def step(model: nn.Module, shard: Any, rank: Rank) -> None:
        ddp = DistributedDataParallel(model)
        if options.get("compare") == "update":
            for part in range(steps):
                model.zero_grad()
                (factor * case.loss(ddp, parts_of(shard, case, steps)[part])).backward()  # type: ignore[operator]
                sgd_step(model, 0.05)
            return
        (factor * case.loss(ddp, shard)).backward()  # type: ignore[operator]

    return step


def parts_of(shard: Any, case: Case, steps: int) -> list[Any]:
    from ddp_equivalence.case.batch import take

    each = N // case.ranks.world_size // steps
    return [
        take(shard, range(part * each, (part + 1) * each), case.batch_dims) for part in range(steps)
    ]


def assert_judged_right(case: Case, options: dict[str, Any]) -> None:
    """A right step is the same, a wrong one differs, and both reports can be printed."""
    right = check(case, step_of(case, options), **options)
    assert right.outcome == "same", right
    assert str(right).splitlines()[0].endswith("is big_batch: same")
    wrong = check(case, step_of(case, options, factor=2.0), **options)
    assert wrong.outcome == "different", wrong
    assert str(wrong).startswith("different: ")
    assert " is not big_batch" in wrong.full_report()


@in_turn(KINDS)
def test_containers_of_every_kind_are_seen_into(name: str, options: dict[str, Any]) -> None:
    assert_judged_right(own_case(batch=BatchOfKind(name), loss=loss_of_any_kind), options)


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_gets_its_own_rows_in_a_container_of_the_same_type(kind: str) -> None:
    def step(model: nn.Module, shard: Any, rank: Rank) -> None:
        assert type(shard) is type(BatchOfKind(kind)(torch.Generator()))
        assert len(rows_and_targets(shard)[0]) == 7 - 2 * rank.rank
        loss_of_any_kind(DistributedDataParallel(model), shard)  # a forward pass only
        ddp = DistributedDataParallel(model)
        count = len(rows_and_targets(shard)[0])
        (loss_of_any_kind(ddp, shard) * count * rank.world_size / N).backward()

    case = own_case(batch=BatchOfKind(kind), loss=loss_of_any_kind, shards="7+5")
    verdict = check(case, step)
    assert verdict.outcome == "same", verdict


DEALT: dict[str, dict[str, Any]] = {
    "names and an array": {
        "batch": with_more(names=NAMES, ids=np.arange(N), unit="cm", classes=["a", "b", "c"]),
        "batch_dims": {"names": 0, "ids": 0},
    },
    "names that are carried whole": {
        "batch": with_more(names=NAMES, ids=np.arange(N)),
        "batch_dims": {"['names']": None, "['ids']": None},
    },
    "a tensor that is carried whole": {
        "batch": with_more(weights=torch.rand(N), scale=torch.tensor(2.0), more=torch.ones(3, 2)),
        "batch_dims": {"weights": None, "scale": None, "more": None},
    },
    "examples along dim 1": {
        "batch": examples_along_dim_1,
        "loss": loss_along_dim_1,
        "batch_dims": 1,
    },
    "images of many sizes": {
        "batch": images_of_many_sizes,
        "loss": loss_of_images,
        "batch_dims": {"images": 0, "names": 0},
    },
    "no tensor with examples": {
        "batch": lengths_of_names,
        "loss": loss_of_names,
        "batch_dims": {"names": 0, "numbers": 0, "scale": None},
    },
}


@in_turn(DEALT)
def test_what_the_case_says_of_its_leaves_is_done(name: str, options: dict[str, Any]) -> None:
    assert_judged_right(own_case(**DEALT[name]), options)


def test_a_rank_gets_what_the_case_says() -> None:
    def step(model: nn.Module, shard: Any, rank: Rank) -> None:
        first = 6 * rank.rank
        assert shard["names"] == NAMES[first : first + 6]
        assert shard["ids"].tolist() == list(range(first, first + 6))
        assert (shard["all"], shard["classes"], len(shard["weights"])) == (NAMES, ("a", "b"), N)
        right_step(model, shard, rank)

    batch = with_more(
        names=NAMES, ids=np.arange(N), all=NAMES, classes=("a", "b"), weights=torch.rand(N)
    )
    dims = {"names": 0, "ids": 0, "all": None, "weights": None}
    assert check(own_case(batch=batch, batch_dims=dims), step).outcome == "same"


def with_a_teacher(generator: torch.Generator) -> Any:
    teacher = nn.Linear(5, 3)
    with torch.no_grad():
        teacher.weight.copy_(torch.randn(3, 5, generator=generator))
        teacher.bias.zero_()
    return make_batch(generator) | {"teacher": teacher.double()}


def loss_with_a_teacher(model: nn.Module, batch: Any) -> Tensor:
    with torch.no_grad():
        wanted = batch["teacher"](batch["rows"])
    return F.mse_loss(model(batch["rows"]), wanted)


def test_a_module_in_the_batch_is_carried_whole() -> None:
    assert_judged_right(own_case(batch=with_a_teacher, loss=loss_with_a_teacher), {})


def deal(batch: Any, indices: list[int]) -> Any:
    return [batch[index] for index in indices]


def list_of_pairs(generator: torch.Generator) -> Any:
    batch = make_batch(generator)
    return list(zip(batch["rows"], batch["targets"], strict=True))


def loss_of_pairs(model: nn.Module, batch: Any) -> Tensor:
    rows, targets = zip(*batch, strict=True)
    return F.mse_loss(model(torch.stack(rows)), torch.stack(targets))


@pytest.mark.parametrize(
    "changes",
    [{"batch_dims": deal, "examples": N}, {"batch_dims": {"": 0}}],
    ids=["a function", "a list"],
)
def test_a_batch_may_be_a_list_of_examples(changes: dict[str, Any]) -> None:
    assert_judged_right(own_case(batch=list_of_pairs, loss=loss_of_pairs, **changes), OPTIONS[-1])


def in_a_type_of_its_own(generator: torch.Generator) -> Any:
    batch = make_batch(generator)
    return Pair([batch["rows"].double(), batch["targets"].double()])


def deal_a_pair(batch: Any, indices: list[int]) -> Any:
    return Pair([leaf[indices] for leaf in batch])


def loss_of_a_pair(model: nn.Module, batch: Any) -> Tensor:
    rows, targets = batch
    return F.mse_loss(model(rows), targets)


def test_a_function_deals_what_nobody_can_see_into() -> None:
    case = own_case(batch=in_a_type_of_its_own, loss=loss_of_a_pair)
    with pytest.raises(BadCase, match="holds tensors that cannot be reached"):
        check(case, right_step)
    assert_judged_right(replace(case, batch_dims=deal_a_pair, examples=N), {})


@pytest.mark.parametrize("name", DEALT)
def test_some_examples_of_the_batch_are_taken_in_the_same_way(name: str) -> None:
    case = with_examples(own_case(**DEALT[name]), (11, 0, 4, 7))
    verdict = check(case, step_of(case, {}))
    assert verdict.outcome == "same", verdict


def test_a_subset_may_have_as_many_examples_as_a_list_has_entries() -> None:
    case = with_examples(own_case(batch=with_more(classes=["a", "b"])), 2)
    assert check(case, right_step).outcome == "same"


def packed() -> Any:
    """Two sequences for each example, as torch packs them for a recurrent layer."""
    return nn.utils.rnn.pack_sequence([torch.ones(2, 5)] * N)


class Opaque(frozenset[Tensor]):
    """It holds tensors where nobody sees them."""


UNCLEAR: list[tuple[str, Callable[[], Any], str, str]] = [
    ("names", lambda: NAMES, "['names']", "batch_dims={\"['names']\": 0} if each example"),
    ("names", lambda: tuple(NAMES), "['names']", "batch_dims={\"['names']\": None} if every rank"),
    ("names", lambda: deque(NAMES), "['names']", "12 entries and the batch has 12 examples"),
    ("ids", lambda: np.arange(N), "['ids']", "batch_dims={\"['ids']\": 0}"),
    (
        "objects",
        lambda: [object() for _ in range(N)],
        "['objects']",
        "12 entries and the batch has 12 examples",
    ),
    ("boxes", lambda: [[1, 2]] * N, "['boxes']", "12 entries and the batch has 12 examples"),
    (
        "inner",
        lambda: {"names": NAMES},
        "['inner']['names']",
        "if each example has one of its entries",
    ),
    ("n", lambda: N, "['n']", "left out of the batch, since a rank has fewer examples"),
    ("maps", lambda: [torch.ones(N, 2)] * N, "['maps']", "if each of its tensors has"),
    ("maps", lambda: [torch.ones(3, 2)] * N, "rows", "a list with one entry for each example"),
    ("scale", lambda: torch.tensor(2.0), "['scale']", "batch_dims={\"['scale']\": None}"),
    ("weights", lambda: torch.ones(3), "weights", "that every rank has it whole"),
    (
        "opaque",
        lambda: Opaque([torch.ones(N)]),
        "['opaque']",
        "holds tensors that cannot be reached",
    ),
    (
        "proxy",
        lambda: MappingProxyType({"a": torch.ones(N)}),
        "['proxy']",
        "holds tensors that cannot be reached",
    ),
    ("pair", lambda: Pair([torch.ones(N)]), "['pair']", "holds tensors that cannot be reached"),
    ("circle", lambda: Circle(torch.ones(N)), "dict", "RecursionError"),
    ("packed", packed, "['packed']", "batch_dims"),
    ("csr", lambda: torch.eye(N).to_sparse_csr(), "['csr']", "instead of torch.sparse_csr"),
    ("csc", lambda: torch.eye(N).to_sparse_csc(), "['csc']", "instead of torch.sparse_csc"),
    ("meta", lambda: torch.ones(N, device="meta"), "['meta']", "on the meta device"),
    (
        "quantized",
        lambda: torch.quantize_per_tensor(torch.ones(N, 2), 0.1, 0, torch.qint8),
        "['quantized']",
        "not quantized",
    ),
    (
        "nested",
        lambda: torch.nested.nested_tensor([torch.ones(2)] * N),
        "['nested']",
        "a list with one tensor for each example",
    ),
    (
        "jagged",
        lambda: torch.nested.nested_tensor([torch.ones(2)] * N, layout=torch.jagged),
        "['jagged']",
        "a list with one tensor for each example",
    ),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "leaf", "path", "says"),
    UNCLEAR,
    ids=[f"{one[0]} {number}" for number, one in enumerate(UNCLEAR)],
)
def test_what_is_not_clear_is_refused_by_name(
    name: str, leaf: Callable[[], Any], path: str, says: str
) -> None:
    with pytest.raises(BadCase) as caught:
        check(own_case(batch=lambda generator: make_batch(generator) | {name: leaf()}), right_step)
    assert caught.value.field == "batch"
    assert path in str(caught.value)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("dims", "says"),
    [
        ({"colour": 0}, "the path of a leaf of the batch, such as"),
        ({"rows": 2}, "examples along dim 2; this one has shape"),
        ({"names": 1}, "0 for a list or tuple"),
        ({"unit": 0}, r"unit'\] is str"),
        ({"rows": -1}, "a dim from 0 of all tensors"),
        ({"rows": True}, "a dim from 0 of all tensors"),
        ("rows", "a dim from 0 of all tensors"),
        (-1, "a dim from 0 of all tensors"),
        (deal, "since a function deals them"),
    ],
)
def test_batch_dims_that_cannot_be_right_are_refused(dims: Any, says: str) -> None:
    with pytest.raises(BadCase, match=says):
        check(own_case(batch=with_more(names=NAMES, unit="cm"), batch_dims=dims), right_step)


def test_a_dealing_function_that_raises_is_refused() -> None:
    case = own_case(batch_dims=deal, examples=N)
    with pytest.raises(BadCase, match="it raised KeyError: 0") as caught:
        check(case, right_step)
    assert caught.value.field == "batch_dims"


def test_a_strategy_takes_examples_along_dim_0_only() -> None:
    with pytest.raises(BadCase, match="or a step of your own: ddp_mean takes") as caught:
        check(own_case(batch_dims=1), "ddp_mean")
    assert caught.value.field == "batch_dims"
    with pytest.raises(BadCase, match="since the catalogue makes the batch"):
        Case(model="mlp", loss="mse_mean", batch_dims=1)


def test_a_model_on_the_meta_device_is_refused() -> None:
    with pytest.raises(BadCase, match="built on the CPU; weight is on the meta device") as caught:
        check(own_case(model=lambda: nn.Linear(5, 3, device="meta")), right_step)
    assert caught.value.field == "model"


STRATEGIES = ["ddp_mean", "ddp_gathered", "ddp_accumulation", "emulated_data_parallel"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_strategies_take_a_dataclass_apart(strategy: str) -> None:
    case = own_case(batch=BatchOfKind("dataclass"), loss=loss_of_any_kind)
    verdict = check(case, strategy)
    assert verdict.outcome == "same", verdict


@pytest.mark.parametrize("fault", ["every_rank_same_data", "accumulation_not_divided"])
@pytest.mark.parametrize("name", ["names and an array", "examples along dim 1"])
def test_a_planted_fault_takes_the_batch_apart_in_the_same_way(name: str, fault: str) -> None:
    case = own_case(**DEALT[name])
    with planted(fault):
        verdict = check(case, step_of(case, {}))
    assert (verdict.outcome, verdict.cause) == ("different", fault), verdict


def with_a_scale(generator: torch.Generator) -> dict[str, Tensor]:
    return make_batch(generator) | {"scale": torch.full((5,), 2.0)}


def halves_the_scale(model: Any, batch: Any) -> Tensor:
    batch["scale"].div_(2)
    return loss(model, {**batch, "rows": batch["rows"] * batch["scale"]})


def test_a_step_may_write_to_a_tensor_that_every_rank_has_whole() -> None:
    def step(model: Any, shard: Any, rank: Any) -> None:
        ddp = DistributedDataParallel(model)
        halves_the_scale(ddp, shard).backward()

    dims = {"['scale']": None}
    case = own_case(batch=with_a_scale, loss=halves_the_scale, batch_dims=dims)
    assert [check(case, step, steps=steps).outcome for steps in (1, 2)] == ["same", "same"]


def test_a_batch_that_is_a_list_of_as_many_tensors_as_each_has_rows_is_refused() -> None:
    with pytest.raises(BadCase, match="8 entries and the batch has 8 examples"):
        check_that_it_is_clear([torch.ones(8, 5)] * 8, None, 8)
    check_that_it_is_clear([torch.ones(8, 5)] * 8, {"": 0}, 8)  # it is said
    check_that_it_is_clear([torch.ones(3, 5), torch.ones(3), torch.ones(3)], None, 3)
