"""A setup in words: who trains, and on how many examples a step."""

from __future__ import annotations

from collections.abc import Iterator

from ddp_equivalence.commands.explain.explanation import Explanation
from ddp_equivalence.commands.explain.setup import Setup
from ddp_equivalence.report.wrapping import plural


def setup_sentences(setup: Setup) -> Iterator[str]:
    """Sentences on the parallelism, and on how a process's batch is dealt to its replicas."""
    processes, gpus = setup.processes, setup.ranks_per_node
    nodes = f"{setup.nodes} {plural(setup.nodes, 'node')}"
    ranks = f"{processes} {plural(processes, 'rank')} on {nodes}"
    replicas = f"{gpus} {plural(gpus, 'replica')}"
    yield {
        "ddp": f"DistributedDataParallel, {ranks}.",
        "all-reduce-sum": f"your own all_reduce, which sums gradients; {ranks}.",
        "data-parallel": f"nn.DataParallel, one process with {replicas}; one loss over the "
        "gathered outputs.",
        "data-parallel-loss-inside": f"nn.DataParallel, one process with {replicas}; each has a "
        "loss of its own, and you take the mean of these.",
        "hybrid": f"{nodes} with one process each; DataParallel inside a process ({replicas}, one "
        "loss over the gathered outputs), DDP's average between the processes.",
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
    """The effective batch as a product."""
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
