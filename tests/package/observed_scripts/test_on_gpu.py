"""Scripts that train on a GPU. Their ranks share one, on gloo, since NCCL refuses that."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from ddp_equivalence.diagnosis.unknown import UnknownBecause
from ddp_equivalence.observed_scripts.report import Observed
from tests.combinations import one_of_each
from tests.package.observed_scripts.observing import observed, source_of_fault

LIMIT = 1e-12
"""The scripts compute in float64."""


@pytest.fixture(params=["gpu", "as_cpu"])
def observed_on(request: pytest.FixtureRequest) -> partial[Observed]:
    """The script as it is; or with the CPU in the place of its GPU."""
    if request.param == "as_cpu":
        return partial(observed, as_cpu=1)
    if not torch.cuda.is_available():
        pytest.skip("NOT RUN: this machine has no CUDA device")
    return partial(observed)


@pytest.mark.parametrize(
    "words",
    one_of_each(
        lambda words: "dropout" in words,
        ["", "half dropout noise", "dropout", "noise", "half", "recurrent dropout"],
    ),
)
def test_a_right_script_trains_as_in_one_process(
    words: str, observed_on: partial[Observed]
) -> None:
    """What is dropped, and which words are replaced, is drawn on the GPU."""
    found = observed_on("on_gpu.py", *words.split())
    assert [verdict.outcome for verdict in found.verdicts] == ["same"] * 3, str(found)
    errors = [verdict.error for verdict in found.verdicts]
    assert all(error is not None and error < LIMIT for error in errors), errors


def test_in_the_precision_of_the_script_the_limit_is_wider(observed_on: partial[Observed]) -> None:
    found = observed_on("on_gpu.py", "half", precision="own", steps=2)
    assert [verdict.outcome for verdict in found.verdicts] == ["same"] * 2, str(found)


def test_convolutions_of_float32_do_not_depend_on_the_size_of_the_batch(
    observed_on: partial[Observed],
) -> None:
    """Cudnn would round to TF32 in some of its algorithms, and chooses one by the batch size."""
    found = observed_on("images_on_gpu.py", precision="own", steps=2)
    assert [verdict.outcome for verdict in found.verdicts] == ["same"] * 2, str(found)
    errors = [verdict.error for verdict in found.verdicts]
    assert all(error is not None and error < 1e-5 for error in errors), errors


@pytest.mark.parametrize(
    ("word", "cause", "line"),
    [
        ("unwrapped", "no_all_reduce", "scaler.scale(loss).backward()"),
        ("times", "sum_not_mean", "loss = loss * dist.get_world_size()"),
        ("half clipped_late", "clipped_while_scaled", "nn.utils.clip_grad_norm_("),
    ],
)
def test_a_broken_script_is_different_and_its_line_is_named(
    word: str, cause: str, line: str, observed_on: partial[Observed]
) -> None:
    found = observed_on("on_gpu.py", *word.split())
    assert (found.outcome, found.cause) == ("different", cause), str(found)
    assert source_of_fault(found).startswith(line), str(found)


def test_numbers_of_an_attention_that_is_one_operation_are_missed() -> None:
    """A GPU has such an attention for float32 and below. It draws for no row by itself."""
    if not torch.cuda.is_available():
        pytest.skip("NOT RUN: this machine has no CUDA device")
    found = observed("on_gpu.py", "half", "dropout", precision="own", steps=1)
    assert found.verdict.unknown_because is UnknownBecause.CANNOT_REPLAY, str(found)
    without = observed("on_gpu.py", "half", "dropout", precision="own", steps=1, dropout=False)
    assert without.outcome == "same", str(without)
