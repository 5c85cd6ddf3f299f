"""Guards against vacuous checks: each says why a comparison shows nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import Tensor

from ddp_equivalence.case.build import build_model
from ddp_equivalence.case.layouts import Layout
from ddp_equivalence.comparison.comparison import Comparison
from ddp_equivalence.comparison.digits import in_order, text_of
from ddp_equivalence.comparison.gradients import DataByRank, differing_leaf, digest
from ddp_equivalence.diagnosis.causes import HYPOTHESES
from ddp_equivalence.diagnosis.hypothesis import ranks_by_number
from ddp_equivalence.diagnosis.reduced import passes_without_sync
from ddp_equivalence.diagnosis.residual import NEGLIGIBLE
from ddp_equivalence.diagnosis.unknown import Unknown, UnknownBecause
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.faults.plant import fault_named
from ddp_equivalence.measurement.calls import CodeLine
from ddp_equivalence.measurement.observation import Observation
from ddp_equivalence.measurement.work import Evidence
from ddp_equivalence.ranks.backend_names import NCCL_BACKENDS
from ddp_equivalence.ranks.collectives import FORGOTTEN
from ddp_equivalence.ranks.gpu_room import SEVERAL
from ddp_equivalence.ranks.lanes import Lane
from ddp_equivalence.reference import Reference
from ddp_equivalence.strategies.strategy import Strategy

EXCHANGES = ("reduce", "gather", "all_to_all", "send", "recv", "scatter")
"""Parts of the names of collectives that can carry a gradient to another rank."""

SAME_SUMS = 1e-3
"""Sums of gradients whose relative difference is smaller are equal. Rounding makes them differ by
less in float64 and float32. In 16 bits it may make them differ by more, and ranks that did the same
work may then pass for ranks that did not."""

DIVERGED = 100.0
"""A loss that grows by more than this factor in a few steps shows that training diverges."""


def against_the_reference(reference: Reference) -> Unknown | None:
    """Nothing can be compared with a big batch whose gradient is zero or not finite."""
    values = [value for value in reference.expected.values() if value is not None]
    what = "update" if reference.compare == "update" else "gradient"
    if not all(map(_is_finite, values)):
        return Unknown(
            UnknownBecause.REFERENCE_NOT_FINITE, f"the big batch's own {what} is not finite"
        )
    if all(not bool(value.to_dense().any()) for value in values):
        moved = "nothing moved" if reference.compare == "update" else "every gradient is zero"
        if reference.losses and not any(reference.losses):
            moved += ", and so is its loss"
        return Unknown(
            UnknownBecause.REFERENCE_IS_ZERO, f"the big batch's own {what} is zero: {moved}"
        )
    return None


def _is_finite(values: Tensor) -> bool:
    """True if every element is finite. Then their sum is as well, unless it is too large."""
    dense = values.to_dense()
    return math.isfinite(dense.sum()) or bool(dense.isfinite().all())


def against_the_evidence(
    evidence: Mapping[int, Evidence],
    strategy: Strategy | None,
    expected: int,
    observed: Mapping[int, Observation],
) -> Unknown | None:
    """The ranks must have sent gradients, and the strategy must really have run.

    ``expected``: the number of ranks that must have reported. ``observed``: what the ranks were
    seen to do, if they ran a second time.
    """
    if len(evidence) != expected:
        return Unknown(
            UnknownBecause.RANK_DID_NOT_REPORT, f"{len(evidence)} of {expected} ranks reported"
        )
    if all(one is None for rank in evidence.values() for one in rank.gradients.values()):
        line = _line_that_leaves_sync_off(observed)
        if line is not None:
            return Unknown(
                UnknownBecause.NO_GRADIENT_LEFT,
                f"the step left no gradient on any rank: line {line.number} of "
                f"{Path(line.file).name} tells FSDP not to reduce gradients, so that none reaches "
                "the shards. Call set_requires_gradient_sync(True) before the last micro-batch",
            )
        return Unknown(
            UnknownBecause.NO_GRADIENT_LEFT,
            "the step left no gradient on any rank: it must leave the gradients on the parameters "
            "of the model that it gets, or return {name: tensor}. If it ends with an optimizer's "
            'zero_grad, compare the weights instead, with compare="update"',
        )
    if strategy is not None and (strategy.one_process or strategy.gpus_per_rank > 1):
        replicas = min(one.notes.get("replicas", 0) for one in evidence.values())
        if replicas < 2:
            return Unknown(
                UnknownBecause.STRATEGY_DID_NOT_RUN,
                f"{strategy.name} did not really run: it needs 2 replicas and had {replicas}",
            )
    return None


def _line_that_leaves_sync_off(observed: Mapping[int, Observation]) -> CodeLine | None:
    """The line that told FSDP not to reduce, if this was in force in the last backward pass."""
    off = passes_without_sync(next((seen.calls for seen in observed.values()), ()))[-1:]
    return next((call.at for one in off for call in one.values()), None)


def against_an_idle_plant(
    evidence: Mapping[int, Evidence], fault: str, layout: Layout
) -> Unknown | None:
    """A check shows nothing if the planted fault never did its damage."""
    if not fault or any(one.planted for one in evidence.values()):
        return None
    if (why := fault_named(fault).why_it_cannot_show(layout)) is not None:
        return _cannot_show(f"{fault} was planted, but {why}")
    return Unknown(
        UnknownBecause.PLANTED_FAULT_NEVER_FIRED,
        f"{fault} was planted, but the step never reached the place where it does its damage",
    )


def against_a_hidden_plant(fault: str, layout: Layout) -> Unknown | None:
    """A check shows nothing if the planted fault fired and yet left the right gradient."""
    if not fault:
        return None
    why = fault_named(fault).why_it_cannot_show(layout) or "the gradient is right all the same"
    return _cannot_show(f"{fault} was planted and fired, but {why}")


def _cannot_show(why: str) -> Unknown:
    return Unknown(UnknownBecause.PLANTED_FAULT_CANNOT_SHOW, f"{why}: it cannot show on this case")


def against_another_start(
    reference: Reference, evidence: Mapping[int, Evidence], start: str = ""
) -> Unknown | None:
    """Nothing is shown of a step that started from other weights; nor by a model that is another
    one at each call, because limits are measured with new ones. ``start``: the digest of the
    weights of the reference, if no other model was needed, for which a large one takes long.
    """
    start = start or digest(dict(build_model(reference.case).named_parameters()))
    other = [rank for rank, one in evidence.items() if one.start != start]
    if not other:
        return None
    return Unknown(
        UnknownBecause.RANKS_BUILD_OTHER_WEIGHTS,
        f"{_who(other)} other weights than the reference: the function that "
        "builds the model must depend on nothing but the seed, which is set in torch, numpy and "
        "random before the function is called",
    )


def against_another_batch(
    expected: DataByRank | None, evidence: Mapping[int, Evidence]
) -> Unknown | None:
    """Nothing can be said of ranks that were given other examples than those of the reference.

    This is asked of a pass too: gradients that agree would not show that the batches do.
    """
    if expected is None:
        return None
    other = {
        rank: leaf
        for rank, one in evidence.items()
        if (leaf := differing_leaf(expected.by_rank[rank], one.data)) is not None
    }
    if not other:
        return None
    return Unknown(
        UnknownBecause.RANKS_BUILD_ANOTHER_BATCH,
        f"{_who(other)} another batch than the reference: "
        f"{next(iter(other.values()))} is not the same, bit for bit. The function that builds the "
        "batch must depend on nothing but the generator that it is given, and the seed, which is "
        "set in torch, numpy and random before it is called. Random data that are made while a "
        "module is imported need a seed of their own; an iterator gives other data at each call",
    )


def _who(ranks: Collection[int]) -> str:
    return f"{ranks_by_number(list(ranks))} build{'s' if len(ranks) == 1 else ''}"


def against_divergence(reference: Reference, step: int) -> Unknown | None:
    """Where training on the big batch itself diverges, rounding decides what comes after.

    ``step`` is the first step that differs; all steps before it were right.
    """
    losses = reference.losses[: step + 1]
    if len(losses) < 2 or not abs(losses[-1]) > DIVERGED * abs(losses[0]):
        return None
    first, last = text_of(losses[0], ".3g"), text_of(losses[-1], ".3g")
    return Unknown(
        UnknownBecause.REFERENCE_DIVERGES,
        f"training on the big batch itself diverges, so rounding decides the result: the loss is "
        f"{first} before the first step and {last} before step {step + 1}, the first step that "
        "differs. Take a smaller learning rate, or fewer steps",
    )


def against_a_pass(
    comparison: Comparison,
    evidence: Mapping[int, Evidence],
    nearest: Callable[[], NearestFault | None],
) -> Unknown | None:
    """A comparison that finds no difference must have been able to find one.

    ``nearest`` computes the known fault that lies nearest to the big batch. It is called only if a
    limit is above ``NEGLIGIBLE``: a fault that changes less than this does not count as a fault.
    """
    if not comparison.parameters or not comparison.elements:
        return Unknown(UnknownBecause.NOTHING_TO_COMPARE, "no gradient element was compared")
    if (identical := _identical_inputs(evidence)) is not None:
        return Unknown(UnknownBecause.IDENTICAL_INPUTS, identical)
    if (uneven := _uneven_autocast(evidence)) is not None:
        return Unknown(UnknownBecause.AUTOCAST_DIFFERS, uneven)
    telling = [one for one in comparison.parameters if one.norm > 0 and not one.limit.only_rounding]
    if not telling:
        return Unknown(UnknownBecause.ONLY_ROUNDING, "every gradient is zero apart from rounding")
    useless = [one.name for one in telling if one.limit.is_useless]
    if useless:
        return Unknown(
            UnknownBecause.LIMIT_ABOVE_SIGNAL,
            f"the limit lies above the signal for {', '.join(useless[:4])}: the big batch's own "
            "gradient moves that far by rounding alone, by randomness that the seed does not fix, "
            "or since a backward method drops the gradient that it is given, and so the scale of "
            "the loss",
        )
    limit = min(one.limit.relative for one in telling)
    fault = nearest() if limit > NEGLIGIBLE else None
    if fault is not None and math.isfinite(fault.distance) and fault.distance < limit:
        return Unknown(
            UnknownBecause.LIMIT_ABOVE_SIGNAL,
            f"the limit lies above the signal: {fault.cause} would pass on this case",
        )
    if len(evidence) > 1 and _nothing_exchanged(evidence, comparison.fewest_exchanged):
        return Unknown(
            UnknownBecause.NOTHING_EXCHANGED,
            "the ranks exchanged no gradient: each rank computed the big batch by itself, so "
            "nothing was shown about training together",
        )
    return None


def _identical_inputs(evidence: Mapping[int, Evidence]) -> str | None:
    """Why a missing all-reduce would not show; None unless all ranks got identical inputs."""
    with_data = [one for one in evidence.values() if any(map(len, one.examples or ()))]
    known = all(all(one.data.values()) for one in with_data)  # else some objects have no digest
    if known and len(with_data) > 1 and len({tuple(one.data.items()) for one in with_data}) == 1:
        return (
            "all ranks were given identical inputs, so a missing all-reduce would not show: "
            "make a batch whose examples differ"
        )
    if len(evidence) > 1 and _did_the_same_work(list(evidence.values())):
        return (
            "the model was called with identical inputs on all ranks, so a missing all-reduce "
            "would not show: does every rank take its own examples (sampler)?"
        )
    return None


def _uneven_autocast(evidence: Mapping[int, Evidence]) -> str | None:
    """What the ranks do otherwise than each other; None if all enter the same autocast regions."""
    ranks_by_autocast: dict[str, list[int]] = {}
    for rank, one in evidence.items():
        names = sorted(f"{device} {dtype}".replace("torch.", "") for device, dtype in one.autocast)
        ranks_by_autocast.setdefault(" and ".join(names) or "none", []).append(rank)
    if len(ranks_by_autocast) <= 1:
        return None
    entered = ", ".join(
        f"{ranks_by_number(ranks)}: {names}" for names, ranks in ranks_by_autocast.items()
    )
    return (
        f"the ranks do not enter the same autocast regions ({entered}), and what this changes is "
        "within the rounding of the lower precision, so that no limit can show it: let all ranks "
        "enter the same"
    )


def _did_the_same_work(ranks: Sequence[Evidence]) -> bool:
    """True if all ranks called the model with the same tensors, and so on the same examples.

    A model may also be called with a grid, or without a tensor, while the loss has the examples;
    or with all examples, of which the loss of each rank counts some. So the same gradients must
    have come back to what it returned, too. Ranks whose examples were dealt to them must moreover
    have left these aside, since each was given others.
    """
    called = {one.inputs for one in ranks}
    if len(called) > 1 or None in called:
        return False
    first, *others = (one.came_back for one in ranks)
    if not all(map(partial(_nearly_equal, first), others)):
        return False
    takes_its_own = any(one.examples is None for one in ranks)
    return takes_its_own or any(one.called_with_given_rows for one in ranks)


def _nearly_equal(sums: Sequence[float], others: Sequence[float]) -> bool:
    """True if the gradients that came back are the same, however rounded; see ``CalledWith``."""
    scale = max((abs(one) for one in sums), default=0.0)
    return all(
        math.isclose(one, other, rel_tol=SAME_SUMS, abs_tol=SAME_SUMS * scale)
        for one, other in zip(sums, others, strict=True)
    )


def _nothing_exchanged(evidence: Mapping[int, Evidence], fewest: int) -> bool:
    """True if torch's flight recorder ran on every rank and saw no exchange of gradients.

    ``fewest``: a collective on fewer elements is no such exchange.
    """
    logs = [one.collectives for one in evidence.values()]
    seen = [log for log in logs if log is not None]
    return len(seen) == len(logs) and not any(
        one.op == FORGOTTEN or (name in one.op and one.elements >= fewest)
        for log in seen
        for one in log
        for name in EXCHANGES
    )


def against_shared_gpus(lane: Lane, evidence: Mapping[int, Evidence]) -> Unknown | None:
    """On NCCL no two ranks may have used one GPU, or training on several GPUs was not shown.

    The lane whose ranks share GPUs on purpose says so in its name.
    """
    if lane.backend not in NCCL_BACKENDS or lane.ranks_share_gpus:
        return None
    ranks: dict[str, list[int]] = {}
    for rank, one in sorted(evidence.items()):
        for gpu in filter(None, one.gpu.split(SEVERAL)):
            ranks.setdefault(gpu, []).append(rank)
    for gpu, sharing in ranks.items():
        if len(sharing) > 1:
            return Unknown(
                UnknownBecause.RANKS_SHARE_A_GPU,
                f"{ranks_by_number(sharing)} have weights or gradients on the same GPU "
                f"({gpu}), so nothing was shown about training on several GPUs: each rank must "
                "compute on the device that it is given (rank.device). Look for "
                "torch.cuda.set_device(0), .cuda() and .to(0) in the step",
            )
    return None


def against_idle_data_parallel(evidence: Mapping[int, Evidence]) -> Unknown | None:
    """Without CUDA devices nn.DataParallel calls the module itself, and is right for nothing."""
    if not any(one.idle_data_parallel for one in evidence.values()):
        return None
    return Unknown(
        UnknownBecause.NOTHING_PARALLEL,
        "the step's nn.DataParallel found no CUDA devices (its device_ids are empty), so it called "
        "the module itself: nothing was parallel, and nothing was shown about nn.DataParallel. "
        'Run it where there are two GPUs, or check its rule with "emulated_data_parallel"',
    )


@dataclass(frozen=True)
class NearestFault:
    """The cause whose prediction lies nearest to the big batch.

    ``distance``: ||predicted - expected|| / ||expected||, on the rank where it is largest.
    """

    cause: str
    distance: float


def nearest_fault(view: View) -> NearestFault | None:
    """The cause that would be hardest to see on this case; None if no cause would show.

    Raises OutOfTime.

    A prediction that equals the big batch does not count: that cause cannot show on this case.
    """
    expected_norm = float(view.expected.norm())
    if expected_norm == 0:
        return None
    nearest = None
    for hypothesis in HYPOTHESES:
        for prediction in hypothesis.predict(view) if hypothesis.limits_must_catch else ():
            # One wrong rank is enough to be seen.
            errors = (prediction.by_rank - view.expected).norm(dim=1)
            distance = float(errors.max()) / expected_norm
            # Of faults that are equally far away, up to rounding, the first is named.
            is_nearer = nearest is None or in_order(distance) < in_order(nearest.distance)
            if distance > NEGLIGIBLE and is_nearer:
                nearest = NearestFault(hypothesis.name, distance)
    return nearest
