"""Run what was explained on ranks, and hold what they find against what was worked out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from ddp_equivalence import session
from ddp_equivalence.case import Case
from ddp_equivalence.explain.arithmetic import Explanation, explain
from ddp_equivalence.explain.measured import measured
from ddp_equivalence.explain.numbers import number
from ddp_equivalence.explain.scaled_down import scaled_down
from ddp_equivalence.explain.setup import KnownGood, Setup
from ddp_equivalence.explain.steps import PADDING, gradient_step, mended_step, training
from ddp_equivalence.models.model import (
    OUTPUT_SIZE,
    ROW_SIZE,
    SEQUENCE_LENGTH,
    VOCABULARY_SIZE,
)
from ddp_equivalence.prose import wrapped
from ddp_equivalence.verdict import Verdict, check

Outcome = Literal["agrees", "differs", "unknown"]

EXACT = 1e-9
"""Between two factors, relative: in float64 rounding stays below 1e-12."""
LITTLE = 1e-6
"""Unexplained: a difference of squares, of which rounding makes 1e-8. Unequal counts leave more
than 1e-2.
"""

STEPS = 3
LEARNING_RATE = Fraction(1, 10)
SLOWEST, FASTEST = 1e-4, 0.5
"""Learning rates with which the small model trains; another known one is replaced."""


@dataclass(frozen=True)
class Comparison:
    """One thing that was predicted and measured. ``why``: why it could not be judged."""

    what: str
    predicted: str
    measured: str
    outcome: Outcome
    why: str = ""


@dataclass(frozen=True)
class Verification:
    """What ranks found. ``setup``: what they ran; ``scaled``: how it differs from what was asked.

    ``outcome``: "agrees" if everything does, "differs" if anything does, else "unknown".
    """

    setup: Setup
    lane: str
    scaled: tuple[str, ...]
    comparisons: tuple[Comparison, ...]

    @property
    def outcome(self) -> Outcome:
        found = {one.outcome for one in self.comparisons}
        for outcome in ("differs", "unknown"):
            if outcome in found:
                return outcome
        return "agrees" if found else "unknown"

    def as_data(self) -> dict[str, Any]:
        """Ready for json."""
        found = [asdict(one) for one in self.comparisons]
        ran = {name: getattr(self.setup, name) for name in ("nodes", "ranks_per_node", "batch")}
        ran["accumulation"] = self.setup.accumulation
        return {
            "outcome": self.outcome,
            "lane": self.lane,
            "ran": ran,
            "scaled": list(self.scaled),
            "comparisons": found,
        }

    def __str__(self) -> str:
        verb = {"agrees": "it agrees", "differs": "IT DIFFERS", "unknown": "not judged"}
        ranks = self.setup.processes
        where = f"{ranks} {'process' if ranks == 1 else 'processes'} ({self.lane})"
        text = f"Verified on {where}: {verb[self.outcome]}."
        if self.scaled:
            text += f" Scaled down: {'; '.join(self.scaled)}."
        if self.setup.replicas > 1:
            text += " DataParallel's replicas are emulated in their process."
        lines = wrapped(text, "  ", "  ")
        for one in self.comparisons:
            said = f"{one.what}: predicted {one.predicted}; measured {one.measured}. {one.why}"
            lines += wrapped(said.strip(), "    ", "    ")
        return "\n".join(lines) + "\n"


def verify(explanation: Explanation) -> Verification:
    """Run the setup on ranks, scaled down if it is large. Raises nothing for what they find."""
    setup, scaled = scaled_down(explanation.setup)
    # A small setup has a prediction of its own; that of the full size is kept where it can be.
    predicted = explain(setup) if scaled else explanation
    with session.using(session.replaced(second_look=False)):
        verdict, found = _gradient(setup, predicted)
        comparisons = [found]
        if predicted.is_multiple and setup.optimizer == "sgd":
            comparisons.append(_training(setup, predicted))
        if not predicted.is_multiple and setup.loss == "token-mean":
            comparisons.append(_mended(setup))
    return Verification(setup, verdict.lane.name, scaled, tuple(comparisons))


def _gradient(setup: Setup, predicted: Explanation) -> tuple[Verdict, Comparison]:
    what = "gradient"
    factor = float(predicted.factor)
    expected = f"{number(predicted.factor)} g"
    if not predicted.is_multiple:
        expected = f"no multiple of g, {expected} on average"
    verdict = check(_case(setup, 1), partial(gradient_step, setup))
    found = measured(verdict, _counts(setup))
    if found is None or (verdict.outcome == "unknown" and verdict.reason):
        return verdict, Comparison(what, expected, "nothing", "unknown", _why(verdict))
    if found.unexplained < LITTLE:
        held = f"{number(found.factor)} g"
        right = predicted.is_multiple and abs(found.factor / factor - 1) < EXACT
    else:
        held = f"no multiple of g ({found.unexplained:.2g} of it unexplained)"
        right = not predicted.is_multiple
        if found.average is not None:
            held += f", {number(found.average)} g on average"
            right = right and abs(found.average / factor - 1) < LITTLE
    return verdict, Comparison(what, expected, held, "agrees" if right else "differs")


def _training(setup: Setup, predicted: Explanation) -> Comparison:
    """With the learning rate that was worked out, against the big batch with the known one."""
    known = _trainable(setup)
    if predicted.learning_rates is None or known != setup.known_good:
        setup = replace(setup, known_good=known)
        predicted = explain(setup)
    assert predicted.learning_rates is not None
    rate, wanted = float(predicted.learning_rates.same_step), float(_of_mean(known))
    what = (
        f"{STEPS} SGD steps with learning rate {number(rate)}, one big batch with {number(wanted)}"
    )
    step = partial(training, setup, rate, STEPS)
    verdict = check(_case(setup, STEPS), step, compare="update", lr=wanted, steps=STEPS)
    return _same(what, "the same weights", verdict)


def _mended(setup: Setup) -> Comparison:
    verdict = check(_case(setup, 1), partial(mended_step, setup))
    return _same("gradient with the tokens counted over all", "g", verdict)


def _same(what: str, expected: str, verdict: Verdict) -> Comparison:
    if verdict.outcome == "unknown":
        return Comparison(what, expected, "nothing", "unknown", _why(verdict))
    if verdict.outcome == "same":
        return Comparison(what, expected, expected, "agrees")
    return Comparison(what, expected, f"something else (error {verdict.error:.2g})", "differs")


def _why(verdict: Verdict) -> str:
    failure = f" {verdict.failure}" if verdict.failure else ""
    return f"{verdict.reason}.{failure}".strip()


def _trainable(setup: Setup) -> KnownGood:
    """What is known to be good; 0.1 on a mean where nothing is, or the small model cannot train so."""
    known = setup.known_good
    if known is not None and SLOWEST <= _of_mean(known) <= FASTEST:
        return known
    return KnownGood(setup.effective_batch, LEARNING_RATE)


def _of_mean(known: KnownGood) -> Fraction:
    """The learning rate that a mean loss over the known batch takes to train as it did."""
    return known.learning_rate * known.factor


def _case(setup: Setup, steps: int) -> Case:
    """The big batch: the mean loss over the effective batch, whatever the ranks' loss is."""
    ranks = setup.processes // setup.nodes
    layout, total = f"{setup.nodes}x{ranks}", setup.effective_batch * steps
    if setup.loss == "token-mean":
        batch = partial(token_batch, setup.effective_batch, steps)
        return Case(model="gru_tied", loss="token_mean", batch=batch, layout=layout)
    batch = partial(labelled_batch, total)
    return Case(model="mlp", loss="cross_entropy_mean", batch=batch, layout=layout)


def _counts(setup: Setup) -> Sequence[int]:
    if setup.loss == "token-mean":
        return _token_counts(setup.effective_batch)
    return [1] * setup.effective_batch


def labelled_batch(examples: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Rows of the small model, shape (examples, 7), and labels, shape (examples,)."""
    rows = torch.randn(examples, ROW_SIZE, generator=generator)
    return {
        "inputs": rows,
        "targets": torch.randint(OUTPUT_SIZE, (examples,), generator=generator),
    }


def token_batch(examples: int, steps: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Token ids and targets, shape (examples x steps, 9); later examples of a step have more
    tokens that count, so that no two parts of a step have as many.
    """
    shape = (examples * steps, SEQUENCE_LENGTH)
    inputs = torch.randint(VOCABULARY_SIZE, shape, generator=generator)
    targets = torch.randint(VOCABULARY_SIZE, shape, generator=generator)
    counts = torch.tensor(_token_counts(examples) * steps)
    padded = torch.arange(SEQUENCE_LENGTH) >= counts[:, None]
    return {"inputs": inputs, "targets": targets.masked_fill(padded, PADDING)}


def _token_counts(examples: int) -> list[int]:
    return [1 + index * SEQUENCE_LENGTH // examples for index in range(examples)]
