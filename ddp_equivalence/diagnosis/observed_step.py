"""What the ranks were seen to do in the step when it ran a second time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from torch import Tensor

from ddp_equivalence.diagnosis.batch_parts import PartsByRank
from ddp_equivalence.diagnosis.rows_read import ExamplesRead, NotKnown, examples_read
from ddp_equivalence.diagnosis.setting import Setting
from ddp_equivalence.diagnosis.step_calls import StepCalls
from ddp_equivalence.measurement.calls import CodeLine
from ddp_equivalence.measurement.further_calls import MOST_LINES
from ddp_equivalence.measurement.observation import Backward, Observation, Wrapper
from ddp_equivalence.ranks.collectives import FORGOTTEN, Collective

WHOLE_NUMBERS = ("Bool", "Byte", "Char", "Short", "Int", "Long")
"""The names of types without fractions in torch's flight recorder: no gradient has one."""


@dataclass(frozen=True)
class ObservedStep:
    """The observations of the ranks.

    ``by_rank``: rank -> what was seen of it; empty where the step did not run a second time.
    ``left_other_bits``: the second run left other gradients than the first. ``first_run``: rank ->
    the collectives of the first run, which are used where nothing was seen of a second one.
    ``examples_computed``: the micro-batches of each rank, as its gradients show them where its rows
    were not recognised.
    """

    setting: Setting
    by_rank: Mapping[int, Observation]
    left_other_bits: bool = False
    first_run: Mapping[int, tuple[Collective, ...] | None] = field(default_factory=dict)
    examples_computed: PartsByRank | None = None

    def only(self, positions: Tensor) -> ObservedStep:
        """The same observations, with these elements of the gradients that were computed."""
        by_rank = {}
        for rank, seen in self.by_rank.items():
            backwards = tuple(
                one if one.gradient is None else replace(one, gradient=one.gradient[positions])
                for one in seen.backwards
            )
            by_rank[rank] = replace(seen, backwards=backwards)
        return replace(self, by_rank=by_rank)

    @property
    def covers_every_rank(self) -> bool:
        return sorted(self.by_rank) == list(range(self.setting.world_size))

    def backwards(self, rank: int) -> list[Backward]:
        """The calls of backward on this rank in this step."""
        calls = self.by_rank[rank].backwards
        return [call for call in calls if call.step == self.setting.step]

    @cached_property
    def calls(self) -> StepCalls:
        """The calls of this step that matter for the gradients, with their lines."""
        step = self.setting.step
        return StepCalls(
            {
                rank: tuple(call for call in seen.calls if call.step == step)
                for rank, seen in self.by_rank.items()
            }
        )

    @cached_property
    def lines_run(self) -> Mapping[int, tuple[CodeLine, ...]]:
        """Rank -> the lines of the user's code that it ran in this step, each once, in order.

        Empty if a rank ran more lines than are remembered.
        """
        step = self.setting.step
        if any(len(seen.lines_run) >= MOST_LINES for seen in self.by_rank.values()):
            return {}
        return {
            rank: tuple(line for number, line in seen.lines_run if number == step)
            for rank, seen in self.by_rank.items()
        }

    @cached_property
    def examples_read(self) -> PartsByRank | None:
        """The micro-batches that each rank read; None unless they are known for every rank."""
        if self._read is None:
            return self.examples_computed
        first = self.setting.first_example
        return tuple(
            tuple(tuple(index - first for index in part) for part in parts)
            for parts in self._read.by_rank
        )

    @cached_property
    def times_read(self) -> Counter[int]:
        """Example -> the number of times that it was read on all ranks together."""
        if self._read is None and self.examples_computed is not None:
            return Counter(i for parts in self.examples_computed for part in parts for i in part)
        times = Counter[int]() if self._read is None else self._read.times
        return Counter({i - self.setting.first_example: count for i, count in times.items()})

    @cached_property
    def equal_where_read(self) -> frozenset[int]:
        """The examples that equal other ones in what was read, so that either may have been."""
        equal = frozenset[int]() if self._read is None else self._read.equal
        return frozenset(index - self.setting.first_example for index in equal)

    @cached_property
    def _read(self) -> ExamplesRead | None:
        """What was read of the examples of all steps."""
        if not self.covers_every_rank:
            return None
        first, shards = self.setting.first_example, self.setting.shards
        dealt = None
        if shards is not None:
            dealt = {
                rank: tuple(first + index for index in shard) for rank, shard in enumerate(shards)
            }
        read = examples_read(self.by_rank, self.setting.step, dealt)
        if isinstance(read, NotKnown):
            return None
        last = first + self.setting.example_count
        return read if all(first <= index < last for index in read.times) else None

    @property
    def records_draws(self) -> bool:
        """True if it is known of every rank which random numbers it drew."""
        return self.covers_every_rank and all(
            seen.draws is not None for seen in self.by_rank.values()
        )

    @property
    def wrappers(self) -> list[Wrapper]:
        """Every DistributedDataParallel that was made around the model, on any rank."""
        return [wrapper for seen in self.by_rank.values() for wrapper in seen.wrappers]

    @property
    def reduced_elements(self) -> int | None:
        """The number of elements that every rank, at least, all-reduced or reduce-scattered.

        None if that is not known, because torch's flight recorder is missing or has lost entries.
        """
        known = self._known_logs
        if known is None:
            return None
        return min(sum(entry.elements for entry in log if "reduce" in entry.op) for log in known)

    @property
    def reduced_floats(self) -> int | None:
        """The same number without tensors of whole numbers. The first run is used if need be."""
        known = self._known_logs
        if known is None:
            return None
        return min(
            sum(
                entry.elements
                for entry in log
                if "reduce" in entry.op and entry.dtype.rpartition(":")[2] not in WHOLE_NUMBERS
            )
            for log in known
        )

    @property
    def _known_logs(self) -> list[tuple[Collective, ...]] | None:
        """What each rank issued; None unless it is known of every rank."""
        logs = [seen.collectives for seen in self.by_rank.values()] or [*self.first_run.values()]
        known = [
            log for log in logs if log is not None and all(entry.op != FORGOTTEN for entry in log)
        ]
        return known if known and len(known) == len(logs) else None

    @property
    def a_rank_gathered(self) -> bool:
        """True if a rank gathered more than single elements."""
        logs = [seen.collectives or () for seen in self.by_rank.values()]
        return any("gather" in entry.op and entry.elements > 1 for log in logs for entry in log)
