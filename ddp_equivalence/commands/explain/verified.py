"""What became of each prediction, as data and as text."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from ddp_equivalence.commands.explain.setup import Setup
from ddp_equivalence.report.wrapping import plural, wrapped

Outcome = Literal["agrees", "differs", "unknown"]


@dataclass(frozen=True)
class Prediction:
    """One thing that was predicted, and what was measured of it. ``why`` it could not be judged."""

    what: str
    predicted: str
    measured: str
    outcome: Outcome
    why: str = ""


@dataclass(frozen=True)
class Verification:
    """What ranks found. ``setup``: what they ran; ``scaled``: how it differs from what was asked;
    ``not_run``: what was said and is not verified.

    ``outcome``: "agrees" if everything does, "differs" if anything does, else "unknown".
    """

    setup: Setup
    lane: str
    scaled: tuple[str, ...]
    comparisons: tuple[Prediction, ...]
    not_run: tuple[str, ...] = ()

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
        for one in self.comparisons:
            said = f"{one.what}: predicted {one.predicted}; measured {one.measured}. {one.why}"
            lines += wrapped(said.strip(), "    ", "    ")
        if self.not_run:
            lines += wrapped(f"Not run: {'; '.join(self.not_run)}.", "    ", "    ")
        return "\n".join(lines) + "\n"
