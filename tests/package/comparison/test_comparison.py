"""compare() is strict about everything that could hide a wrong gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ddp_equivalence import SuiteBug
from ddp_equivalence.comparison.comparison import Comparison, compare
from ddp_equivalence.comparison.tolerance import EPS_MULTIPLES, Noise, Tolerance

WEIGHT = torch.randn(50, 40, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
TRUTH = {
    "weight": WEIGHT,
    "bias": torch.randn(40, generator=torch.Generator().manual_seed(2), dtype=torch.float64),
    "frozen": None,
}


def measured(**changes: Tensor | None) -> dict[str, Tensor | None]:
    found = {name: None if one is None else one.clone() for name, one in TRUTH.items()}
    return found | changes


def judge(
    *ranks: dict[str, Tensor | None], dtype: torch.dtype = torch.float64, exact: bool = False
) -> Comparison:
    return compare(TRUTH, dict(enumerate(ranks)), Tolerance(dtype, exact))


def test_equal_gradients_on_all_ranks_are_the_same() -> None:
    found = judge(measured(), measured())
    assert found.same
    assert found.ranks == (0, 1)
    assert found.elements == 2040


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"extra": torch.zeros(1)}, "extra is not a parameter of the model"),
        ({"bias": None}, "bias is None, expected"),
        ({"frozen": torch.ones(2, dtype=torch.float64)}, "frozen is (2,) float64, expected None"),
        ({"bias": torch.zeros(20, dtype=torch.float64)}, "bias is (20,) float64, expected (40,)"),
        ({"bias": torch.zeros(40)}, "bias is float32 instead of float64"),
    ],
)
def test_names_shapes_dtypes_and_none_must_be_equal(
    change: dict[str, Tensor | None], says: str
) -> None:
    found = judge(measured(), measured() | change)
    assert not found.same
    assert any(line.startswith("rank 1") and says in line for line in found.structure)


def test_a_missing_parameter_is_a_difference() -> None:
    less = measured()
    del less["bias"]
    found = judge(measured(), less)
    assert not found.same
    assert found.structure == ("rank 1: bias is missing",)


@pytest.mark.parametrize("factor", [1 + 1e-6, 1 - 1e-6, 2.0, 0.5, -1.0, 0.0])
def test_a_wrong_factor_is_seen_and_measured(factor: float) -> None:
    wrong = measured(weight=factor * WEIGHT)
    found = judge(wrong, wrong)
    assert not found.same
    (one,) = found.differing
    assert one.name == "weight"
    assert one.worst.factor == pytest.approx(factor, rel=1e-12)
    assert one.error == pytest.approx(abs(factor - 1), rel=1e-6)


def test_one_wrong_element_cannot_hide_in_a_large_tensor() -> None:
    generator = torch.Generator().manual_seed(3)
    truth = {"weight": torch.randn(4_000_000, generator=generator, dtype=torch.float64)}
    value = truth["weight"].clone()
    value[123_456] *= 1 + 1e-3
    found = compare(truth, {0: {"weight": value.float()}}, Tolerance(torch.float32))
    (one,) = found.differing
    assert one.error < one.limit.relative
    assert one.worst.element > one.limit.element


def test_rounding_alone_stays_the_same_in_every_precision() -> None:
    for dtype in EPS_MULTIPLES:
        rounded = {n: None if t is None else t.to(dtype).clone() for n, t in TRUTH.items()}
        assert judge(rounded, rounded, dtype=dtype).same


def test_ranks_that_differ_in_one_bit_are_a_difference() -> None:
    weight = TRUTH["weight"]
    assert weight is not None
    other = weight.clone()
    other[0, 0] = torch.nextafter(other[0, 0], torch.tensor(9.0, dtype=torch.float64))
    found = judge(measured(), measured(weight=other))
    assert not found.differing
    assert not found.ranks_agree
    assert not found.same


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_is_a_difference(value: float) -> None:
    bias = TRUTH["bias"]
    assert bias is not None
    wrong = bias.clone()
    wrong[3] = value
    assert not judge(measured(bias=wrong)).same


def test_exact_means_every_bit() -> None:
    weight = TRUTH["weight"]
    assert weight is not None
    assert judge(measured(), exact=True).same
    assert not judge(measured(weight=weight * (1 + 2**-52)), exact=True).same


def test_a_tiny_gradient_is_compared_relative_to_itself() -> None:
    """The fixed absolute tolerance of assert_close would pass a sign flip of this one."""
    truth = {"weight": 3e-6 * torch.ones(4, dtype=torch.float64)}
    torch.testing.assert_close(-truth["weight"].float(), truth["weight"].float())
    found = compare(truth, {0: {"weight": -truth["weight"]}}, Tolerance(torch.float64))
    assert not found.same


def test_the_limit_grows_with_what_one_device_gets_wrong_and_says_so() -> None:
    tolerance = Tolerance(torch.float32)
    eps = torch.finfo(torch.float32).eps
    lucky = tolerance.limit(norm=2.0, noise=Noise())
    assert lucky.relative == pytest.approx(64 * eps)
    assert lucky.reason == "64 eps of float32"
    unlucky = tolerance.limit(norm=2.0, noise=Noise(norm=2.0 * 100 * eps))
    assert unlucky.relative == pytest.approx(800 * eps)
    assert unlucky.floor == pytest.approx(100 * eps)
    assert unlucky.reason == "8 x the error of one device"


def test_a_parameter_without_elements_is_compared_by_its_structure() -> None:
    empty = {"empty": torch.empty(0, dtype=torch.float64), "one": torch.ones(1).double()}
    copies = {name: one.clone() for name, one in empty.items()}
    assert compare(empty, {0: copies}, Tolerance(torch.float64)).same
    longer = {"empty": torch.zeros(1).double(), "one": torch.ones(1).double()}
    assert not compare(empty, {0: longer}, Tolerance(torch.float64)).same


def test_a_reference_compared_with_itself_is_refused() -> None:
    with pytest.raises(SuiteBug, match="is the reference itself: same memory"):
        compare(TRUTH, {0: TRUTH}, Tolerance(torch.float64))
