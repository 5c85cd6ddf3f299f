"""What ranks found about each prediction, as data and as text."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from ddp_equivalence.commands.explain.setup import Setup
from ddp_equivalence.report.wrapping import plural, wrapped

VerificationOutcome = Literal["agrees", "differs", "unknown"]


@dataclass(frozen=True)
class ComparedPrediction:
    """One prediction and what was measured.

    ``what``: the name of what is predicted. ``why``: the reason if the prediction could not be
    judged.
    """

    what: str
    predicted: str
    measured: str
    outcome: VerificationOutcome
    why: str = ""


@dataclass(frozen=True)
class Verification:
    """What ranks found.

    ``setup``: the setup that they ran. ``lane``: the name of the backend on a kind of device.
    ``scaled``: how that setup differs from the explained one. ``not_run``: the parts of the
    explanation that were not verified.
    """

    setup: Setup
    lane: str
    scaled: tuple[str, ...]
    comparisons: tuple[ComparedPrediction, ...]
    not_run: tuple[str, ...] = ()

    @property
    def outcome(self) -> VerificationOutcome:
        """The worst outcome of any prediction; "unknown" if there is no prediction."""
        outcomes = {prediction.outcome for prediction in self.comparisons}
        for outcome in ("differs", "unknown"):
            if outcome in outcomes:
                return outcome
        return "agrees" if outcomes else "unknown"

    def as_data(self) -> dict[str, Any]:
        """The verification, ready for json."""
        comparisons = [asdict(prediction) for prediction in self.comparisons]
        ran = {name: getattr(self.setup, name) for name in ("nodes", "ranks_per_node", "batch")}
        ran["accumulation"] = self.setup.accumulation
        return {
            "outcome": self.outcome,
            "lane": self.lane,
            "ran": ran,
            "scaled": list(self.scaled),
            "comparisons": comparisons,
            "not_run": list(self.not_run),
        }

    def __str__(self) -> str:
        verb = {"agrees": "it agrees", "differs": "IT DIFFERS", "unknown": "not judged"}
        ranks = self.setup.processes
        where = f"{ranks} {plural(ranks, 'process', 'processes')} ({self.lane})"
        text = f"Verified on {where}: {verb[self.outcome]}."
        if self.scaled:
            text += f" Scaled down: {'; '.join(self.scaled)}."
        if self.setup.replicas > 1:
            text += " DataParallel's replicas are emulated in their process."
        lines = wrapped(text, "  ", "  ")
        for prediction in self.comparisons:
            sentence = (
                f"{prediction.what}: predicted {prediction.predicted}; measured "
                f"{prediction.measured}. {prediction.why}"
            )
            lines += wrapped(sentence.strip(), "    ", "    ")
        if self.not_run:
            lines += wrapped(f"Not run: {'; '.join(self.not_run)}.", "    ", "    ")
        return "\n".join(lines) + "\n"
