"""The package that the sandbox needs, and that only an optional extra installs."""

from __future__ import annotations

from importlib.util import find_spec

from ddp_equivalence.case.errors import BadCase


def require_scipy() -> None:
    """Raises BadCase if scipy, which computes the intervals, is not installed."""
    if find_spec("scipy") is None:
        right = "an installed scipy: pip install 'ddp_equivalence[sandbox]'"
        raise BadCase("sandbox", "no scipy", right)
