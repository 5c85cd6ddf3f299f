"""A setup in words: who trains, on how many examples a step, and in how many steps an epoch."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from ddp_equivalence.explain.arithmetic import Explanation
from ddp_equivalence.explain.setup import Setup
from ddp_equivalence.prose import plural


def setup_sentences(setup: Setup) -> Iterator[str]:
    """The parallelism, and how a process's batch is dealt to its replicas."""
    processes, gpus = setup.processes, setup.ranks_per_node
    nodes = f"{setup.nodes} {plural(setup.nodes, 'node')}"
    ranks = f"{processes} {plural(processes, 'rank')} on {nodes}"
    replicas = f"{gpus} {plural(gpus, 'replica')}"
    yield {
        "ddp": f"DistributedDataParallel, {ranks}.",
        "all-reduce-sum": f"your own all_reduce of gradients, a sum, {ranks}.",
        "data-parallel": f"nn.DataParallel, one process with {replicas}; one loss over the "
        "gathered outputs.",
        "data-parallel-loss-inside": f"nn.DataParallel, one process with {replicas}; each has a "
        "loss of its own, and you take their mean.",
        "hybrid": f"{nodes}, one process each; DataParallel inside with {replicas} and one loss "
        "over the gathered outputs, DDP's average between.",
        "none": "one process on one device.",
    }[setup.parallelism]
    if setup.replicas == 1:
        return
    sizes = setup.replica_sizes
    each = " + ".join(map(str, sizes)) if len(set(sizes)) > 1 else f"{sizes[0]} each"
    split = f"{len(sizes)} {plural(len(sizes), 'replica')}: {each}"
    yield f"The batch of {setup.batch} is per process, and is split over {split}."
    idle = setup.replicas - len(sizes)
    if idle:
        verb = "idles" if idle == 1 else "idle"
        yield (
            f"{idle} {plural(idle, 'replica')} {verb}: DataParallel deals {sizes[0]} to each until "
            "nothing is left."
        )


def batch_sentences(explanation: Explanation) -> Iterator[str]:
    """The product that the effective batch is."""
    setup = explanation.setup
    factors = [f"{setup.batch} {plural(setup.batch, 'example')}"]
    if setup.processes > 1:
        who = "processes" if setup.parallelism == "hybrid" else "ranks"
        factors.append(f"{setup.processes} {who}")
    if setup.accumulation > 1:
        factors.append(f"{setup.accumulation} micro-batches")
    if len(factors) == 1:
        yield f"{factors[0]} a step."
    else:
        yield f"{' x '.join(factors)} = {explanation.effective_batch} a step."


def epoch_sentences(explanation: Explanation) -> Iterator[str]:
    """Steps in an epoch, what is repeated and what is left out."""
    epoch, setup = explanation.epoch, explanation.setup
    if epoch is None:
        return
    whose = "" if setup.processes == 1 else f", {epoch.examples_each} a rank (DistributedSampler)"
    batches = f"{epoch.micro_batches} {plural(epoch.micro_batches, 'batch', 'batches')}"
    short = epoch.last_batch != setup.batch
    last = f", the last of {epoch.last_batch}" if short else ""
    steps = "" if setup.accumulation > 1 else f", and as many {plural(epoch.steps, 'step')}"
    yield f"{setup.examples} examples{whose}: {batches} of {setup.batch}{last}{steps}."
    if setup.accumulation > 1:
        yield from _window_sentences(explanation)
    last_step = ((epoch.rest or setup.accumulation) - 1) * setup.batch + epoch.last_batch
    smaller = Fraction(last_step, setup.accumulation * setup.batch)
    if setup.loss == "sum" and smaller < 1:
        yield (
            f"The last step adds up {last_step} {plural(last_step, 'example')} a rank: its "
            f"gradient is {smaller} as large as that of the others."
        )
    if epoch.repeated:
        yield (
            f"{epoch.repeated} {plural(epoch.repeated, 'example')} of them repeated, to give every "
            f"rank as many: {setup.processes} x {epoch.examples_each} = "
            f"{setup.processes * epoch.examples_each}."
        )
    if epoch.dropped:
        yield f"{epoch.dropped} {plural(epoch.dropped, 'example')} left out (drop_last)."
    known = setup.known_good
    if known is not None and setup.examples is not None and known.batch != setup.effective_batch:
        then = -(-setup.examples // known.batch)
        yield f"The known batch of {known.batch} has {then} {plural(then, 'step')} an epoch."


def _window_sentences(explanation: Explanation) -> Iterator[str]:
    epoch, setup = explanation.epoch, explanation.setup
    assert epoch is not None
    rest, whole = epoch.rest, setup.accumulation
    full = f"{epoch.full_steps} {plural(epoch.full_steps, 'step')} of {whole} micro-batches"
    alone = rest == 1
    if epoch.last_batch != setup.batch and setup.loss == "mean" and not alone:
        yield (
            f"The last batch, of {epoch.last_batch}, weighs as much as the full ones in its step: "
            f"there an example counts {setup.batch}/{epoch.last_batch} as often as one of theirs. "
            "drop_last leaves it out."
        )
    if not rest:
        yield f"{full}."
        return
    yield (
        f"{full}, and one of {rest} if the loop steps at the end of an epoch. If it does not, "
        "clear the gradient there, or it is added to the next epoch's first step."
    )
    if setup.loss == "sum":
        return
    if setup.accumulation_divided:
        yield f"Divide by {rest} in that step: divided by {whole} it is {rest}/{whole} as large."
    else:
        yield f"That step's gradient is {rest}/{whole} as large as that of the others."
