"""The constants at the top of a script: everything about the case that is a number or a name."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_equivalence.case.case import Case
from ddp_equivalence.case.example_subset import SubsetBuilder
from ddp_equivalence.case.models import MODELS
from ddp_equivalence.case.random_state import APART, batch_seed, generator_seed
from ddp_equivalence.case.shards import Shards, split
from ddp_equivalence.measurement.request import Request
from ddp_equivalence.report.script.slicing.literals import indices_literal

BACKENDS = {
    "gloo_fallback": None,
    "nccl": None,
    "nccl_shared": None,
    "emulated": "gloo",
    "data_parallel": "gloo_cuda",
    "data_parallel_shared": "gloo_cuda",
}
"""Lane -> backend, where their names differ; None: the script chooses it when it starts."""


def case_constants(request: Request, batch_sizes: Sequence[int]) -> dict[str, str]:
    """The source of every constant, by its name in ``template/placeholders.py``.

    ``batch_sizes``: the examples in the big batch of every step.
    """
    case = request.case
    ranks = case.ranks
    shards = [split(case.shards, size, ranks.world_size) for size in batch_sizes]
    one_process = request.strategy is not None and request.strategy.one_process
    whole_batches = [Shards((tuple(range(size)),), size) for size in batch_sizes]
    backend = BACKENDS.get(request.lane.name, request.lane.name)
    model = MODELS.get(case.model) if isinstance(case.model, str) else None
    ranks_of_node = [ranks.ranks_on(node) for node in range(ranks.nodes)]
    return {
        "NODE_OF_RANK": "(0,)" if one_process else repr(tuple(row.node for row in ranks.rows)),
        "BACKEND": repr(backend) + ("" if backend else "  # NCCL if there are GPUs, else gloo"),
        "SEED": repr(case.seed),
        "SEED_DISTANCE": f"{APART if request.seeds == 'apart' else 0}  # between two ranks",
        "BATCH_SEED": repr(batch_seed(case.seed)),
        "GENERATOR_SEED": repr(generator_seed(case.seed)),
        "DTYPE": str(case.dtype),
        "TOLERANCE": "0.0  # bit for bit" if case.exact else "1.0",
        "LEARNING_RATE": repr(request.lr),
        "BIG_BATCHES": f"[{', '.join(_examples(case, batch_sizes))}]  # the examples of every step",
        "SHARDS": _shards(whole_batches if one_process else shards),
        "CASE_SHARDS": _shards(shards),
        "EXAMPLES": repr(sum(batch_sizes)),
        "OUTPUT_SIZE": repr(model.output_size if model else 0),
        "PADDED": repr(list(shards[0].indices[-1])),
        "UNUSED_PARAMETERS": repr(bool(model and model.unused_on_some_ranks)),
        "RANKS_OF_NODE": repr(ranks_of_node),
        "LOSS_NAME": repr(case.loss if isinstance(case.loss, str) else None),
    }


def _examples(case: Case, batch_sizes: Sequence[int]) -> list[str]:
    """The positions of every step's examples in what the batch builder returns."""
    starts = [sum(batch_sizes[:step]) for step in range(len(batch_sizes))]
    of_steps = [range(start, start + size) for start, size in zip(starts, batch_sizes, strict=True)]
    if isinstance(case.batch, SubsetBuilder):
        taken = case.batch.positions
        return [indices_literal(taken[one.start : one.stop]) for one in of_steps]
    return list(map(str, of_steps))


def _shards(of_steps: list[Shards]) -> str:
    rows = [f"[{', '.join(map(indices_literal, shards.indices))}]" for shards in of_steps]
    return f"[{', '.join(rows)}]  # the examples of every rank, in every step"
