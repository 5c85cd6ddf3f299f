"""The state of every lane on this machine: it works, it gives wrong answers, or it cannot run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from ddp_equivalence.case.layouts import parse
from ddp_equivalence.ranks import probe
from ddp_equivalence.ranks.backend_names import LANES
from ddp_equivalence.ranks.failure import RankFailed
from ddp_equivalence.ranks.lanes import Lane, cuda_devices, missing
from ddp_equivalence.ranks.warm_ranks import warm_ranks

DEADLINE = 30.0
"""The seconds for all answers of one lane. One collective gets half of them."""

LANES_TRIED = tuple(lane for lane in LANES if lane not in ("gloo", "emulated"))


@dataclass(frozen=True)
class LaneState:
    """One lane. ``works`` is None where the machine lacks what the lane needs.

    ``text``: the right answers, the wrong ones, or what the machine lacks.
    """

    name: str
    works: bool | None
    text: str


def lane_states() -> Iterator[LaneState]:
    """Look at every lane. Where it can run, ask its collectives questions with known answers."""
    for name in LANES_TRIED:
        ranks = 2 if name != "gloo_cuda" else 1
        reason = missing(name, ranks)
        if reason is not None:
            yield LaneState(name, None, reason)
        elif name == "data_parallel":
            yield LaneState(name, True, f"nn.DataParallel over {len(cuda_devices())} devices")
        else:
            yield _probe(name)


def _probe(name: str) -> LaneState:
    device = "cpu" if name == "gloo_fallback" else "cuda"
    backend = "gloo" if name.startswith("gloo") else name
    lane, layout = Lane(name, backend, device), parse("1x2")
    began = time.monotonic()
    try:
        with warm_ranks().acquire(layout, lane, DEADLINE / 2) as ranks:
            seconds_to_start = time.monotonic() - began
            results = probe.probe_ranks(ranks, DEADLINE)
    except RankFailed as error:
        return LaneState(name, False, str(error))
    wrong = [f"{result.collective} ({result.detail})" for result in results if result.wrong]
    if wrong:
        return LaneState(name, False, f"wrong answers: {', '.join(wrong)}")
    right = sum(result.correct for result in results)
    text = f"{right} answers right, ranks started in {seconds_to_start:.1f} s"
    refused = probe.summarise_refusals(results)
    return LaneState(name, True, f"{text}; refuses {refused}" if refused else text)
