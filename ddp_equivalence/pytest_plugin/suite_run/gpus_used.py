"""Which GPUs the cases of a run used, by which ranks, and which GPU of the machine no case used."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ddp_equivalence.ranks.gpu_room import SEVERAL
from ddp_equivalence.ranks.gpus import Gpu, plain_uuid
from ddp_equivalence.ranks.nccl import Transport
from ddp_equivalence.report.record import Record
from ddp_equivalence.report.text import Line, Style, plural

HEADER = "cases by GPU"

SHORT = len("GPU-12345678")
"""So much of a UUID is shown for a GPU that NVML does not know."""


@dataclass
class Use:
    """How one GPU was used: lane -> number of cases, and the ranks that were on it."""

    cases: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    ranks: set[int] = field(default_factory=set)


def gpus_used(records: Sequence[Record]) -> dict[str, Use]:
    """UUID -> how its GPU was used by checks that reached a verdict."""
    uses: dict[str, Use] = defaultdict(Use)
    for record in records:
        if not record.was_compared or not record.gpu:
            continue
        of_case = set()
        for rank, names in enumerate(record.gpu.split(", ")):
            for name in names.split(SEVERAL):
                uses[name].ranks.add(rank)
                of_case.add(name)
        for name in of_case:
            uses[name].cases[record.backend] += 1
    return dict(uses)


def gpu_lines(records: Sequence[Record], gpus: Sequence[Gpu], devices: int) -> Iterator[Line]:
    """A row for each GPU; none if no check says on which GPU it ran.

    ``gpus``: those that the ranks may use, as far as NVML names them. ``devices``: their number.
    """
    uses = gpus_used(records)
    if not uses:
        return
    rows = _rows(uses, gpus)
    lanes = sorted({lane for use in uses.values() for lane in use.cases})
    width = max(len(HEADER), *map(len, rows)) + 2
    header = "".join(f"{lane:>{len(lane) + 2}}" for lane in lanes)
    yield Line(f"{HEADER:<{width}}{header}    ranks that ran on it")
    for name, use in rows.items():
        cells = "".join(f"{use.cases.get(lane, 0) or '–':>{len(lane) + 2}}" for lane in lanes)
        if use.ranks:
            yield Line(f"{name:<{width}}{cells}    {', '.join(map(str, sorted(use.ranks)))}")
        else:
            yield Line(f"{name:<{width}}{cells}    no case used it", Style.UNCERTAIN)
    unknown = devices - len(rows)
    if not gpus and unknown > 0:
        others = f"{unknown} other CUDA {plural(unknown, 'device')}"
        text = f"no case used {others}, which NVML did not name"
        yield Line(text, Style.UNCERTAIN)


def transport_line(transport: Transport, ranks: int) -> Line:
    """What NCCL chose in the probe after the run."""
    if transport.problem:
        text = f"NCCL's transport is not known: {transport.problem}"
        return Line(text, Style.UNCERTAIN)
    chosen = ", ".join(
        f"{name} for {count} {plural(count, 'pair')} of ranks"
        for name, count in transport.counts.items()
    )
    return Line(f"NCCL's transport, in a probe with {ranks} ranks on one node: {chosen}")


def most_ranks(records: Sequence[Record], lane: str) -> int:
    """The largest number of ranks of a case that was compared on this lane; 0 if none was."""
    on_lane = (record for record in records if record.was_compared and record.backend == lane)
    return max((record.ranks for record in on_lane), default=0)


def _rows(uses: Mapping[str, Use], gpus: Sequence[Gpu]) -> dict[str, Use]:
    """What a row begins with -> how its GPU was used, in NVML's order; unknown GPUs come last."""
    left = dict(uses)
    rows: dict[str, Use] = {}
    for gpu in gpus:
        uuids = [plain_uuid(uuid) for uuid in (gpu.uuid or "", *gpu.mig_uuids) if uuid]
        of_gpu = [name for name in left if plain_uuid(name) in uuids]
        rows[f"GPU {gpu.index}, {gpu.name or 'name unknown'}"] = _together(
            [left.pop(name) for name in of_gpu]
        )
    for name, use in left.items():
        rows[name[:SHORT]] = use
    return rows


def _together(uses: Sequence[Use]) -> Use:
    """The use of a GPU by several names: the instances of a divided one."""
    together = Use()
    for use in uses:
        together.ranks |= use.ranks
        for lane, cases in use.cases.items():
            together.cases[lane] += cases
    return together
