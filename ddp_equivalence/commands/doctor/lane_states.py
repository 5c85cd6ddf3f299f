"""What this machine can run, and why not the rest."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass

from ddp_equivalence.case.layouts import parse
from ddp_equivalence.ranks import probe
from ddp_equivalence.ranks.backend_names import LANES
from ddp_equivalence.ranks.failure import RankFailed
from ddp_equivalence.ranks.lanes import Lane, cuda_devices, missing
from ddp_equivalence.ranks.warm_ranks import warm_ranks
from ddp_equivalence.report.versions import versions

DEADLINE = 30.0

SHOWN = tuple(lane for lane in LANES if lane not in ("gloo", "emulated"))


@dataclass(frozen=True)
class LaneState:
    """One lane: ``works`` is None where the machine lacks what it needs; ``text`` says it all."""

    name: str
    works: bool | None
    text: str


def lane_states() -> Iterator[LaneState]:
    """Look at every lane; where it can run, ask its collectives on two ranks."""
    for name in SHOWN:
        ranks = 2 if name != "gloo_cuda" else 1
        reason = missing(name, ranks)
        if reason is not None:
            yield LaneState(name, None, reason)
        elif name == "data_parallel":
            yield LaneState(name, True, f"nn.DataParallel over {len(cuda_devices())} devices")
        else:
            yield _probe(name)


def lines(states: list[LaneState]) -> Iterator[str]:
    """The doctor's answer."""
    found = versions()
    yield f"ddp_equivalence {found['ddp_equivalence']}, torch {found['torch']}, " + (
        f"Python {found['python']}"
    )
    yield f"{found['platform']}, {os.cpu_count()} CPU cores"
    devices = found["cuda_devices"]
    yield f"CUDA devices: {devices}" + (
        f" (CUDA {found['cuda']}, NCCL {found['nccl']})" if devices else ""
    )
    yield ""
    yield "Lanes, each with 2 ranks and collectives with known answers"
    for state in states:
        word = {True: "works", False: "WRONG", None: "no"}[state.works]
        yield f"  {state.name:<15}{word:<7}{state.text}"
    if not devices:
        yield ""
        yield (
            "Cases that would run on NCCL fall back to gloo on the CPU, and are marked "
            "gloo_fallback."
        )


def _probe(name: str) -> LaneState:
    device = "cpu" if name == "gloo_fallback" else "cuda"
    backend = "gloo" if name.startswith("gloo") else name
    lane, layout = Lane(name, backend, device), parse("1x2")
    started = time.monotonic()
    try:
        with warm_ranks().acquire(layout, lane, DEADLINE / 2) as ranks:
            start = time.monotonic() - started
            answers = probe.ask(ranks, DEADLINE)
    except RankFailed as error:
        return LaneState(name, False, str(error))
    wrong = [f"{one.what} ({one.detail})" for one in answers if one.wrong]
    if wrong:
        return LaneState(name, False, f"wrong answers: {', '.join(wrong)}")
    right = sum(one.right for one in answers)
    text = f"{right} answers right, ranks started in {start:.1f} s"
    refused = probe.refused_in_short(answers)
    return LaneState(name, True, f"{text}; refuses {refused}" if refused else text)
