"""Packages that parts of the sandbox need, and that only an optional extra installs."""

from __future__ import annotations

from importlib.util import find_spec

from ddp_equivalence.case.errors import BadCase


def require_matplotlib() -> None:
    """Raises BadCase if matplotlib, which draws the plots, is not installed."""
    _require_package("matplotlib", field="plot", extra="plots")


def require_scipy() -> None:
    """Raises BadCase if scipy, which computes the intervals, is not installed."""
    _require_package("scipy", field="sandbox", extra="sandbox")


def _require_package(package: str, field: str, extra: str) -> None:
    if find_spec(package) is None:
        right = f"an installed {package}: pip install 'ddp_equivalence[{extra}]'"
        raise BadCase(field, f"no {package}", right)
