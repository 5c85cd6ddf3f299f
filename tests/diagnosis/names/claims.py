"""What a report says was seen, and the record that must bear it out."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ddp_equivalence.diagnosis.hypothesis import common_loss_factor
from ddp_equivalence.diagnosis.setting import REDUCING, reduces_gradients
from ddp_equivalence.measurement.calls import Call, CollectiveCall, Contents, Kind
from ddp_equivalence.measurement.observation import Observation, Wrapper
from ddp_equivalence.report.verdict import Verdict

OF_PARAMETERS = (Contents.PARAMETERS, Contents.COPIES_OF_PARAMETERS)


@dataclass(frozen=True)
class Claim:
    """``pattern``: the words that say something was seen. ``holds``: whether it is on record."""

    pattern: str
    holds: Callable[[Verdict], bool]


def ranks(verdict: Verdict) -> list[Observation]:
    return list(verdict.observed.values())


def calls(verdict: Verdict) -> Iterator[Call]:
    for seen in ranks(verdict):
        yield from seen.calls


def collectives(verdict: Verdict) -> Iterator[CollectiveCall]:
    return (call.collective for call in calls(verdict) if call.collective is not None)


def wrappers(verdict: Verdict) -> list[Wrapper]:
    return [wrapper for seen in ranks(verdict) for wrapper in seen.wrappers]


def flags(verdict: Verdict) -> list[bool]:
    return [flag for wrapper in wrappers(verdict) for flag in wrapper.synchronised]


def elements(verdict: Verdict) -> int:
    assert verdict.comparison is not None
    return verdict.comparison.elements


def no_gradient_was_reduced(verdict: Verdict) -> bool:
    """By the recorded calls, and by what torch's flight recorder has beside them."""
    if any(map(reduces_gradients, calls(verdict))):
        return False
    for seen in ranks(verdict):
        issued = sum(one.elements for one in seen.collectives or () if "reduce" in one.op)
        known = [call.collective for call in seen.calls if call.collective is not None]
        others = sum(
            one.elements for one in known if one.op in REDUCING and one.contents in OF_PARAMETERS
        )
        if issued - others >= elements(verdict):
            return False
    return bool(verdict.observed)


def parameters_were_reduced(verdict: Verdict) -> bool:
    return any(one.contents in OF_PARAMETERS and one.op in REDUCING for one in collectives(verdict))


def was_freed(verdict: Verdict) -> bool:
    return any(wrapper.freed for wrapper in wrappers(verdict))


def a_rank_clipped(verdict: Verdict) -> bool:
    made_smaller = (
        call.change is not None and (call.change.factor is None or abs(call.change.factor) < 1)
        for call in calls(verdict)
    )
    return (
        any(seen.clipped for seen in ranks(verdict))
        or any(call.kind is Kind.CLIP for call in calls(verdict))
        or any(made_smaller)
    )


def torch_clipped(verdict: Verdict) -> bool:
    recorded = any(call.kind is Kind.CLIP and "norm" in call.what for call in calls(verdict))
    return recorded or any(seen.clipped for seen in ranks(verdict))


def several_backwards(verdict: Verdict) -> bool:
    return max(len(seen.backwards) for seen in ranks(verdict)) > 1


def one_seed(verdict: Verdict) -> bool:
    seeds = {tuple(forward.seed for forward in seen.forwards) for seen in ranks(verdict)}
    return len(seeds) == 1


def weights_differed(verdict: Verdict) -> bool:
    first = {seen.forwards[0].weights for seen in ranks(verdict) if seen.forwards}
    return len(first) > 1


def buffers_differed(verdict: Verdict) -> bool:
    held: dict[str, set[bytes]] = {}
    for seen in ranks(verdict):
        for name, value in seen.forwards[-1].buffers.items() if seen.forwards else ():
            held.setdefault(name, set()).add(value.numpy().tobytes())
    return any(len(values) > 1 for values in held.values())


def read(verdict: Verdict) -> dict[int, int]:
    view = verdict.view
    return {} if view is None else dict(view.observed.times_read)


def read_twice(verdict: Verdict) -> bool:
    return any(times > 1 for times in read(verdict).values())


def some_were_not_read(verdict: Verdict) -> bool:
    times = read(verdict)
    return bool(times) and any(not times.get(one) for one in range(sum(verdict.examples)))


def shares_overlapped(verdict: Verdict) -> bool:
    view = verdict.view
    if view is None or view.observed.examples_read is None:
        return False
    by_rank = [{index for part in parts for index in part} for parts in view.observed.examples_read]
    return sum(map(len, by_rank)) > len(set().union(*by_rank))


def all_read_the_same(verdict: Verdict) -> bool:
    view = verdict.view
    if view is None or view.observed.examples_read is None:
        return False
    by_rank = {
        tuple(sorted(index for part in parts for index in part))
        for parts in view.observed.examples_read
    }
    return len(by_rank) == 1


def groups_are_apart(verdict: Verdict) -> bool:
    """In the calls of the step, or, where torch reduces, in its flight recorder on each rank."""
    groups = {frozenset(one.ranks) for one in collectives(verdict) if one.op in REDUCING}
    if groups:
        return len(groups) > 1 and frozenset(range(len(verdict.observed))) not in groups
    return all(
        seen.collectives and all(one.group for one in seen.collectives if "reduce" in one.op)
        for seen in ranks(verdict)
    )


def some_were_frozen(verdict: Verdict) -> bool:
    return len({seen.frozen for seen in ranks(verdict)}) > 1


def half_precision_was_reduced(verdict: Verdict) -> bool:
    dtypes = {one.dtype for seen in ranks(verdict) for one in seen.collectives or ()}
    return any("Half" in dtype or "BFloat16" in dtype for dtype in dtypes)


def inside_backward(verdict: Verdict) -> bool:
    """In one backward of a rank at least, such as that of one micro-batch."""
    backwards = [one for seen in ranks(verdict) for one in seen.backwards]
    return any((end or 0) > (begin or 0) for begin, end in (one.issued for one in backwards))


def several_buckets(verdict: Verdict) -> bool:
    return len(verdict.observed) > 1 and any(len(one.buckets) > 1 for one in wrappers(verdict))


def everywhere_at_one_loss(verdict: Verdict) -> bool:
    losses = [one.loss for seen in ranks(verdict) for one in seen.backwards]
    known = [loss for loss in losses if loss is not None]
    return len(known) == len(losses) and max(known) - min(known) <= 1e-3 * max(map(abs, known))


def summed_again(verdict: Verdict) -> bool:
    """A rank gave gradients of the same parameters to two sums over the same ranks."""
    for seen in ranks(verdict):
        given = [
            (name, one.ranks)
            for one in (call.collective for call in seen.calls)
            if one is not None and one.reduce_op == "SUM" and one.contents is Contents.GRADIENTS
            for name in one.names
        ]
        if len(given) > len(set(given)):
            return True
    return False


def draws(verdict: Verdict) -> bool:
    """The big batch draws, or the ranks were seen to: then the view has the ranks' numbers."""
    if verdict.view is None:
        return False
    by_rank = verdict.view.observed.by_rank.values()
    return verdict.view.examples.draws_random_numbers or any(one.draws for one in by_rank)


def divided(verdict: Verdict, by: float) -> bool:
    """A rank divided gradients or a loss by this number."""
    for seen in ranks(verdict):
        losses = [one.value for one in seen.calls if one.kind is Kind.LOSS and one.value]
        ratios = [first / second for first in losses for second in losses]
        ratios += [1 / one.change.factor for one in seen.calls if one.change and one.change.factor]
        if any(math.isclose(one, by, rel_tol=1e-4) for one in ratios):
            return True
    return False


def divided_as_said(verdict: Verdict) -> bool:
    said = re.findall(r"a division by (\d+)[a-z ,]* was seen", verdict.full_report())
    return all(divided(verdict, float(one)) for one in said)


def began_at_other_losses(verdict: Verdict) -> bool:
    """Every backward began at a loss, and not at that of its rows."""
    view = verdict.view
    factor = None if view is None else common_loss_factor(view)
    return factor is not None and abs(factor - 1) > 1e-3


CLAIMS = (
    Claim("[Nn]o gradient was reduced|Nothing was reduced", no_gradient_was_reduced),
    Claim("no gradient went through a collective", no_gradient_was_reduced),
    Claim("all-reduced, and no gradient", no_gradient_was_reduced),
    Claim("so nothing was reduced", no_gradient_was_reduced),
    Claim("there was no wrapper", lambda verdict: not wrappers(verdict)),
    Claim(
        "there was no DistributedDataParallel|no DistributedDataParallel was called",
        lambda verdict: not flags(verdict),
    ),
    Claim("Parameters were all-reduced", parameters_were_reduced),
    Claim(r"parameters? (was|were) all-reduced, and", parameters_were_reduced),
    Claim(
        "no parameter was all-reduced",
        lambda verdict: not parameters_were_reduced(verdict),
    ),
    Claim(
        "gradients, or copies of them, were reduced",
        lambda verdict: not no_gradient_was_reduced(verdict),
    ),
    Claim("was freed before backward|was gone when backward", was_freed),
    Claim("FREED before backward", was_freed),
    Claim("was freed before its backward", lambda verdict: not was_freed(verdict)),
    Claim("Each rank clipped the norm", a_rank_clipped),
    Claim("clip_grad_norm_ was called", torch_clipped),
    Claim(
        "synchronisation was off in all|not to synchronise in any",
        lambda verdict: bool(flags(verdict)) and not any(flags(verdict)),
    ),
    Claim("synchronisation was on in a", lambda verdict: any(flags(verdict))),
    Claim(
        "its DistributedDataParallel never was|not through its DistributedDataParallel",
        lambda verdict: bool(wrappers(verdict)) and not flags(verdict),
    ),
    Claim("DistributedDataParallel itself was called", lambda verdict: bool(flags(verdict))),
    Claim(r"backward was called \d+ times", several_backwards),
    Claim("backward was called once", lambda verdict: not several_backwards(verdict)),
    Claim("Buffers of the model .* differ between the ranks", buffers_differed),
    Claim("before the forward pass, .* differed between the ranks", buffers_differed),
    Claim("the step set the same seed", one_seed),
    Claim("The step gives all ranks the same seed", one_seed),
    Claim("The ranks did not begin the forward pass with the same weights", weights_differed),
    Claim("all ranks began the forward pass with the same", lambda one: not weights_differed(one)),
    Claim("read more than once", read_twice),
    Claim("Some examples were read more than once", read_twice),
    Claim("no example was read twice", lambda verdict: not read_twice(verdict)),
    Claim("no rank read|were read by no rank", some_were_not_read),
    Claim("Several ranks read|(both|all) read example", shares_overlapped),
    Claim("every example was read", lambda verdict: not some_were_not_read(verdict)),
    Claim("All ranks read the same examples|every rank read", all_read_the_same),
    Claim("the ranks read different examples", lambda verdict: not all_read_the_same(verdict)),
    Claim("reduced in groups|only within groups", groups_are_apart),
    Claim("requires_grad of a parameter that differs was False", some_were_frozen),
    Claim("A parameter requires no gradient on one rank", some_were_frozen),
    Claim("a reduction ran in", half_precision_was_reduced),
    Claim("collectives were issued while backward was running", inside_backward),
    Claim("The gradients of a whole bucket of DDP|whole buckets? of DDP", several_buckets),
    Claim("the second run of the step left other bits", lambda one: one.repeated is False),
    Claim("began at the loss of the whole batch on every rank", everywhere_at_one_loss),
    Claim(r"went into (\d+|several) sums over|were added up over the same ranks", summed_again),
    Claim("draws random numbers", draws),
    Claim(r"a division by \d+[a-z ,]* was seen", divided_as_said),
    Claim(r"every backward began at .* times the loss of its rows", began_at_other_losses),
    Claim("losses at which backward began have this factor already", began_at_other_losses),
)


def false_claims(verdict: Verdict, text: str) -> list[str]:
    """The words of a report that the record does not bear out."""
    flat = " ".join(text.split())
    found = []
    for claim in CLAIMS:
        match = re.search(claim.pattern, flat)
        if match is not None and not claim.holds(verdict):
            found.append(flat[max(0, match.start() - 60) : match.end() + 60])
    return found
