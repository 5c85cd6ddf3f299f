"""A script takes the batch apart as the check does, whatever the batch is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import BadCase, Rank
from ddp_equivalence.case.build import with_examples
from ddp_equivalence.report.script import export
from tests.package.case.batches import (
    NAMES,
    Encoding,
    FrozenRows,
    Holder,
    examples_along_dim_1,
    images_of_many_sizes,
    loss_along_dim_1,
    loss_of_images,
)
from tests.package.case.test_batches import deal, list_of_pairs, loss_of_pairs
from tests.package.case.test_unusual_tensors import (
    complex_rows,
    loss_of_complex,
    loss_of_sparse,
    loss_with_a_gradient_penalty,
    rows_with_a_gradient,
    sparse,
)
from tests.package.own_cases import loss, make_batch, own_case, right_step
from tests.package.report.exported_scripts import assert_same_big_batch, by_itself, torchrun


def encoding(generator: torch.Generator) -> Any:
    return Encoding(make_batch(generator))


def frozen_rows(generator: torch.Generator) -> Any:
    return FrozenRows(**make_batch(generator))


def holder(generator: torch.Generator) -> Any:
    return Holder(**make_batch(generator))


def loss_of_attributes(model: nn.Module, batch: Any) -> Tensor:
    return loss(model, {"rows": batch.rows, "targets": batch.targets})


def with_names(generator: torch.Generator) -> Any:
    return make_batch(generator) | {"names": NAMES, "ids": np.arange(12), "scale": torch.ones(12)}


BATCHES: dict[str, dict[str, Any]] = {
    "user dict": {"batch": encoding},
    "frozen": {"batch": frozen_rows, "loss": loss_of_attributes},
    "object": {"batch": holder, "loss": loss_of_attributes},
    "names": {"batch": with_names, "batch_dims": {"names": 0, "['ids']": 0, "scale": None}},
    "dim 1": {"batch": examples_along_dim_1, "loss": loss_along_dim_1, "batch_dims": 1},
    "images": {
        "batch": images_of_many_sizes,
        "loss": loss_of_images,
        "batch_dims": {"images": 0, "names": 0},
    },
    "function": {
        "batch": list_of_pairs,
        "loss": loss_of_pairs,
        "batch_dims": deal,
        "examples": 12,
    },
    "sparse": {"batch": sparse, "loss": loss_of_sparse},
    "complex": {"batch": complex_rows, "loss": loss_of_complex},
    "gradient": {"batch": rows_with_a_gradient, "loss": loss_with_a_gradient_penalty},
}


def any_step(model: nn.Module, shard: Any, rank: Rank) -> None:
    """It is not run."""


@pytest.mark.parametrize("options", [{}, {"steps": 2}, {"compare": "update", "steps": 3}])
@pytest.mark.parametrize("name", BATCHES)
def test_the_script_has_the_same_big_batch(
    name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    case = own_case(**BATCHES[name])
    path = export(case, any_step, tmp_path, name="script", **options)
    assert_same_big_batch(by_itself(path), case, **options)


@pytest.mark.parametrize("subset", [8, (11, 0, 4, 7)])
@pytest.mark.parametrize("name", [*BATCHES, "plain"])
def test_the_script_takes_the_same_examples(name: str, subset: Any, tmp_path: Path) -> None:
    case = with_examples(own_case(**BATCHES.get(name, {})), subset)
    path = export(case, any_step, tmp_path, name="script", steps=2)
    assert_same_big_batch(by_itself(path), case, steps=2)


def own_names_only(model: nn.Module, shard: Any, rank: Rank) -> None:
    first = 6 * rank.rank
    assert shard["names"] == [f"row {place}" for place in range(first, first + 6)]
    assert shard["ids"].tolist() == list(range(first, first + 6))
    assert len(shard["scale"]) == 12
    ddp = DistributedDataParallel(model)
    loss(ddp, shard).backward()


def test_a_rank_of_the_script_is_given_its_own_names(tmp_path: Path) -> None:
    path = export(own_case(**BATCHES["names"]), own_names_only, tmp_path)
    code, shown = torchrun(path, ranks=2)
    assert code == 0, shown
    assert "same: 4 of 4 parameters agree" in shown


def trains_twice(model: nn.Module, shard: Any, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    for part in range(2):
        model.zero_grad()
        half = {name: leaf.chunk(2)[part] for name, leaf in shard.items()}
        loss(ddp, half).backward()
        torch.optim.SGD(model.parameters(), lr=0.05).step()


def test_a_trainer_of_the_script_is_given_the_examples_of_all_steps(tmp_path: Path) -> None:
    options: dict[str, Any] = {"compare": "update", "steps": 2, "lr": 0.05}
    path = export(own_case(), trains_twice, tmp_path, **options)
    code, shown = torchrun(path, ranks=2)
    assert code == 0, shown


def test_a_dealing_function_without_source_is_refused_by_its_field(tmp_path: Path) -> None:
    case = own_case(batch=list_of_pairs, loss=loss_of_pairs, batch_dims=eval, examples=12)
    with pytest.raises(BadCase):
        export(case, right_step, tmp_path)
