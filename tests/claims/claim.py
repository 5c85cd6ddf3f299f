"""What makes a test a claim: what is said, the verdict, and that it would fail were it otherwise.

A claim is a test whose docstring says, in its first paragraph, what people say, and in the rest
what is so, and why. It lays what it measured before ``evidence`` and asserts. ``opposite`` changes
one rule of the test into its contrary; ``test_every_claim_can_fail.py`` sees the claim fail then.

    @claim("false", divide_by=2, opposite=Opposite("gradients are only added", divide_by=1))
    def test_ddp_averages(evidence: Evidence, divide_by: int) -> None:
        '''Averaging makes the gradient too small.

        The mean of the ranks' means is the big batch's mean.
        '''
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.claims import page


class Opposite:
    """The contrary of a claim's rule: what it ``says``, and arguments that make it so."""

    def __init__(self, says: str, **arguments: Any) -> None:
        self.says = says
        self.arguments = arguments


@dataclass
class Evidence:
    """What a claim measured: a table, printed on the page. A figure must be the same every run."""

    rows: list[Mapping[str, str]] = field(default_factory=list)

    def __call__(self, **cells: object) -> None:
        """Add a row; an underscore in a column's name stands for a space."""
        self.rows.append({name.replace("_", " "): shown(cell) for name, cell in cells.items()})


@dataclass(frozen=True)
class Claim:
    """A test and its verdict: "true", "false", or "true when ...".

    ``name``: of the test. ``topic``: of its module. ``arguments``: of the test, as things are.
    """

    function: Callable[..., None]
    verdict: str
    opposite: Opposite
    arguments: Mapping[str, Any]

    @property
    def name(self) -> str:
        return self.function.__name__

    @property
    def topic(self) -> str:
        return self.function.__module__.rpartition(".")[2]

    @property
    def said(self) -> str:
        return self._text.partition("\n\n")[0].replace("\n", " ")

    @property
    def answer(self) -> str:
        return self._text.partition("\n\n")[2]

    @property
    def _text(self) -> str:
        return inspect.cleandoc(self.function.__doc__ or "")


def claim(
    verdict: str, *, opposite: Opposite, **arguments: Any
) -> Callable[[Callable[..., None]], Any]:
    """Make a test a claim, and hold its section of the page to what it measures."""

    def decorate(function: Callable[..., None]) -> Callable[[], None]:
        made = Claim(function, verdict, opposite, arguments)

        @functools.wraps(function)
        def test() -> None:
            evidence = Evidence()
            function(evidence, **arguments)
            page.hold(made, evidence.rows)

        del test.__wrapped__  # pytest would ask for its arguments
        test.claim = made  # type: ignore[attr-defined]
        return test

    return decorate


def shown(value: object) -> str:
    """A figure as the page prints it: four digits, and nothing below what rounding leaves."""
    if isinstance(value, float):
        return "0" if abs(value) < 1e-12 else f"{value:.4g}"
    return str(value)
