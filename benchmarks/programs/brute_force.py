"""Runs programs without this package: is a right one right, and a wrong one wrong?

Every rank is a process that joins a gloo group, takes its examples, and calls the program's step.
It then computes the big batch by itself in float64, and how far its gradients are from that. Only
the descriptions of the programs (``Case``) and ``Rank``, which holds numbers, are the package's.
"""

from __future__ import annotations

import hashlib
import inspect
import math
import multiprocessing
import os
import tempfile
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # the constructor of DDP imports it; imported here, it is forked to all ranks
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from benchmarks.programs.big_batch import (
    Gradients,
    batches_of,
    big_batch,
    build,
    plain_sgd_step,
    set_seeds,
)
from benchmarks.programs.program import Program
from ddp_equivalence import Rank

FLOOR_IN_EPS = {torch.float64: 256, torch.float32: 64, torch.bfloat16: 8, torch.float16: 8}
"""The least limit of the package in each precision, which docs/tolerance.md states."""

MANY_LIMITS = 10
SECONDS_A_PROGRAM = 30.0

SEEDS_APART = 1000
"""The seeds of two ranks differ by this where a step trains."""


@dataclass(frozen=True)
class Measured:
    """What the ranks left, without the package.

    ``distance``: how far the worst parameter on the worst rank is from the big batch; infinite if a
    rank never finished. ``limit``: the one that docs/tolerance.md describes: eight times the
    distance of one device in the program's precision, or some multiple of its eps. ``agree``: the
    ranks hold the same bits. ``finished``: all ranks have finished.
    """

    distance: float
    limit: float
    agree: bool
    finished: bool

    def shows(self, program: Program) -> bool:
        """True if the program is what it says. A wrong one may be right by luck if it says so."""
        if program.right:
            return self.distance <= self.limit and self.agree
        if not self.finished:
            return program.expected == "unknown"
        far = self.distance > MANY_LIMITS * self.limit
        return far or not self.agree or program.expected == "unknown"


def verify(programs: list[Program]) -> int:
    """Print how far each program is from the big batch; return 1 if one is not what it says."""
    contradicted = []
    left_out = sum(not program.is_verified for program in programs)
    programs = [program for program in programs if program.is_verified]
    for program in programs:
        found = measure(program)
        if not found.shows(program):
            contradicted.append(program.name)
        side, limits = "right" if program.right else "wrong", found.distance / found.limit
        agree = "agree " if found.agree else "differ"
        note = "" if found.shows(program) else "   <-- CONTRADICTED"
        print(f"{side}  ranks {agree}  {found.distance:8.1e}  {limits:8.1e} limits  ", end="")
        print(f"{program.name}{note}", flush=True)
    print(f"{len(programs) - len(contradicted)} of {len(programs)} are what they say")
    for name in contradicted:
        print(f"  not {name}")
    if left_out:
        print(f"not verified, since only this package follows them: {left_out} programs")
    return int(bool(contradicted))


def measure(program: Program) -> Measured:
    """Run the program on processes of its own."""
    nodes = nodes_of(program.case.layout)
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=_on_rank, args=(program, nodes, rank, folder))
            for rank in range(sum(nodes))
        ]
        for rank in ranks:
            rank.start()
        deadline = time.monotonic() + SECONDS_A_PROGRAM
        for rank in ranks:
            rank.join(max(0.0, deadline - time.monotonic()))
            if rank.is_alive():
                rank.kill()
                rank.join()
        files = [Path(folder, f"found{rank}") for rank in range(len(ranks))]
        found = [file.read_text().split() for file in files if file.exists()]
    dtype = program.rounds_in or program.case.dtype or torch.float32
    least = FLOOR_IN_EPS[dtype] * torch.finfo(dtype).eps
    finished = len(found) == len(ranks)
    return Measured(
        distance=max(float(distance) for distance, _, _ in found) if finished else math.inf,
        limit=max([least, *(8 * float(alone) for _, alone, _ in found)]),
        agree=len({bits for _, _, bits in found}) == 1,
        finished=finished,
    )


def nodes_of(layout: str) -> list[int]:
    """The number of ranks on each node: ``2x3`` and ``3+3`` are two nodes of three ranks."""
    if "+" in layout:
        return [int(part) for part in layout.split("+")]
    nodes, _, each = layout.partition("x")
    return [int(each)] * int(nodes)


def _on_rank(program: Program, nodes: list[int], number: int, folder: str) -> None:
    node = next(n for n in range(len(nodes)) if number < sum(nodes[: n + 1]))
    local, world = number - sum(nodes[:node]), sum(nodes)
    rank = Rank(number, world, local, nodes[node], node, len(nodes), torch.device("cpu"), "gloo")
    os.environ |= {"RANK": str(number), "WORLD_SIZE": str(world), "LOCAL_RANK": str(local)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(nodes[node]), "GROUP_RANK": str(node)}
    os.environ["TORCHELASTIC_RUN_ID"] = "none"
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # wrong programs complain at length
    store = dist.FileStore(f"{folder}/store", world)
    seconds = float(program.options.get("collective_deadline") or SECONDS_A_PROGRAM / 2)
    dist.init_process_group(
        "gloo", store=store, rank=number, world_size=world, timeout=timedelta(seconds=seconds)
    )
    try:
        measured = _program(program, rank)
        truth = big_batch(program, torch.float64)
        distance = _distance(measured, truth)
        alone = _distance(big_batch(program, program.case.dtype), truth)
        Path(folder, f"found{number}").write_text(f"{distance} {alone} {_bits(measured)}")
    finally:
        os._exit(0)  # destructors of groups may wait for ranks that have failed


def _program(program: Program, rank: Rank) -> Gradients:
    """What the step leaves on this rank."""
    model, batches = build(program), batches_of(program)
    shards = [_shard(program.case.shards, batch, rank) for batch in batches]
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    if program.options.get("compare") == "update":
        set_seeds(1 + SEEDS_APART * rank.rank)
        weights: Any = _trained(program, model, shards, rank) or dict(model.named_parameters())
        return [{name: _whole(weights[name]) - start for name, start in before.items()}]
    found: Gradients = []
    for shard in shards:
        model.zero_grad(set_to_none=True)
        set_seeds(1 + len(found))
        returned: Any = program.step(model, shard, rank)  # type: ignore[operator]
        own = {_bare(n): p.grad for n, p in model.named_parameters()}
        if isinstance(returned, dict) and own.keys() & {_bare(name) for name in returned}:
            own = {_bare(name): gradient for name, gradient in returned.items()}  # and no metrics
        found.append({n: None if g is None else g.detach().clone() for n, g in own.items()})
        plain_sgd_step(model, program)
    return found


def _trained(program: Program, model: nn.Module, shards: list[Any], rank: Rank) -> Any:
    """Train with the step, which is called once, or prepared and called for each big batch."""
    step: Any = program.step
    if list(inspect.signature(step).parameters) == ["model", "rank"]:
        prepared = step(model, rank)
        for shard in shards:
            prepared(shard)
        return None
    joined = pytree.tree_map(
        lambda *parts: torch.cat(parts) if isinstance(parts[0], Tensor) else parts[0], *shards
    )
    return step(model, joined, rank)


def _whole(weight: Tensor) -> Tensor:
    """The weight, put together from its shards if there are any."""
    whole: Tensor = weight.full_tensor() if isinstance(weight, DTensor) else weight
    return whole.detach()


def _bare(name: str) -> str:
    """A parameter's name without the names of wrappers."""
    return name.replace("module.", "")


def _distance(measured: Gradients, truth: Gradients) -> float:
    """The largest ||m - t|| / ||t||; a gradient that is zero is compared with all together."""
    worst = 0.0
    for got, right in zip(measured, truth, strict=True):
        dense = {n: t.to_dense().double() for n, t in right.items() if t is not None}
        whole = math.sqrt(sum(float(t.square().sum()) for t in dense.values()))
        for name, true in right.items():
            found = got.get(name)
            t = dense.get(name, torch.zeros(())) if true is None else dense[name]
            m = torch.zeros_like(t) if found is None else found.to_dense().double()
            norm = float(t.norm())
            error = float((m - t).norm()) / (norm if norm > 1e-9 * whole else whole)
            worst = max(worst, math.inf if math.isnan(error) else error)
    return worst


def _bits(measured: Gradients) -> str:
    """A hash of all gradients."""
    hashed = hashlib.sha256()
    for of_step in measured:
        for name in sorted(of_step):
            gradient = of_step[name]
            if gradient is not None:
                hashed.update(f"{name} {gradient.to_dense().double().tolist()}".encode())
    return hashed.hexdigest()


def _shard(shards: str, batch: Any, rank: Rank) -> Any:
    """The examples of this rank."""

    def of_leaf(leaf: Tensor) -> Tensor:
        if shards == "own":
            return leaf.clone()
        if shards == "interleaved":
            return leaf[rank.rank :: rank.world_size].clone()
        each = len(leaf) // rank.world_size
        sizes = [each] * rank.world_size
        if shards != "equal":
            sizes = [int(part) for part in shards.split("+")]
        return leaf.split(sizes)[rank.rank].clone()

    cut = pytree.tree_map_only(Tensor, of_leaf, batch)
    if isinstance(batch, dict):  # a list with an entry for each example is cut, too
        for name, leaf in batch.items():
            if isinstance(leaf, list) and len(leaf) == len(batch["rows"]):
                each = len(leaf) // rank.world_size
                cut[name] = leaf[rank.rank * each : (rank.rank + 1) * each]
    return cut
