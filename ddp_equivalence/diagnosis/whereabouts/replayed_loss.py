"""Computes the loss of the case of some rows alone, and watches it as the ranks are watched."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ddp_equivalence.case.batch import take
from ddp_equivalence.case.build import build_model
from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.diagnosis.setting import Setting
from ddp_equivalence.diagnosis.time_left import WHEREABOUTS, OutOfTime, TimeLeft
from ddp_equivalence.diagnosis.whereabouts.pieces import Piece, Pieces
from ddp_equivalence.faults.plant import without_planted_faults
from ddp_equivalence.measurement.cut_watch import TO_PYTHON, CutWatch
from ddp_equivalence.measurement.cuts import Cut
from ddp_equivalence.measurement.module_watch import ModuleWatch
from ddp_equivalence.measurement.observation import Indices
from ddp_equivalence.measurement.random_draws import Draw, DrawReplay
from ddp_equivalence.measurement.trace import ModuleCall
from ddp_equivalence.reference import in_dtype, loss_of_the_case, train

MOST_NODES = 20_000
"""Of a larger graph, only the nodes next to the loss are looked at."""


@dataclass(frozen=True)
class Replay:
    """``calls``: of modules. ``cuts``: as on a rank. ``nodes``: the names of the functions of
    autograd that the loss is made of.
    """

    calls: tuple[ModuleCall, ...]
    cuts: tuple[Cut, ...]
    nodes: frozenset[str]

    @property
    def with_gradients(self) -> tuple[ModuleCall, ...]:
        """The calls of modules where gradients are turned on."""
        return tuple(call for call in self.calls if call.with_gradients)


def replay_of(pieces: Pieces, piece: Piece) -> Replay | None:
    """What the loss of the case does with the rows of a piece; None if that is not known."""
    if piece.rows is None:
        return None
    setting = pieces.view.setting
    generator = piece.forward.generator if piece.forward and setting.draws_on_cpu else b""
    draws = pieces.view.examples.drawn_for(piece.rows)
    return replay_of_rows(setting, piece.rows, pieces.view.time, generator, draws)


def replay_of_a_shard(setting: Setting, time: TimeLeft) -> Replay | None:
    """What the loss of the case does with the examples of rank 0; None if there is no time."""
    rows = setting.shards[0] if setting.shards else tuple(range(setting.example_count))
    with time.counted(WHEREABOUTS):
        try:
            return replay_of_rows(setting, rows, time)
        except OutOfTime:
            time.leave_out(WHEREABOUTS)
            return None


def replay_of_rows(
    setting: Setting,
    rows: Indices,
    time: TimeLeft,
    generator: bytes = b"",
    draws: Sequence[Draw] | None = None,
) -> Replay | None:
    """What the loss of the case does with these rows; None if it cannot be computed.

    ``generator``: the state that torch's generator gets before it, unless this is empty.
    ``draws``: the random numbers that it draws, if they are known.
    """
    loss = loss_of_the_case(setting.case)
    number, inside = -1, False
    nodes: frozenset[str] = frozenset()

    def counted(model: nn.Module, batch: Any) -> Any:
        nonlocal number, inside, nodes
        number, inside = number + 1, True
        if generator:
            torch.set_rng_state(torch.frombuffer(bytearray(generator), dtype=torch.uint8))
        try:
            value = loss(model, batch)
            nodes = _nodes_of(value)
            return value
        finally:
            inside = False

    batches = [
        in_dtype(one, torch.float64)
        for one in (
            *setting.earlier_batches,
            take(setting.batch, rows, setting.case.batch_dims),
        )
    ]
    with time.gradient(len(rows)), warnings.catch_warnings(), without_planted_faults():
        warnings.simplefilter("ignore")
        model = build_model(setting.case).double()
        modules = ModuleWatch(model, lambda: (number, 0, not inside))
        cuts = CutWatch(lambda: (number, 0, not inside))
        try:
            drawing = nullcontext() if draws is None else DrawReplay(draws).watching()
            with modules.watching(), cuts.watching(), drawing:
                train(setting.case, model, batches, "gradients", setting.training, counted)
        except BadCase:
            return None
    last = len(batches) - 1
    return Replay(
        calls=tuple(call for call in modules.calls if call.step == last),
        cuts=tuple(
            cut
            for cut in cuts.found
            if cut.step == last and not (cut.in_backward and cut.what in TO_PYTHON)
        ),
        nodes=nodes,
    )


def _nodes_of(value: object) -> frozenset[str]:
    """The names of the functions of autograd behind a tensor."""
    waiting = deque([value.grad_fn] if isinstance(value, Tensor) and value.grad_fn else [])
    known: set[Any] = set(waiting)
    while waiting and len(known) < MOST_NODES:
        for one, _ in waiting.popleft().next_functions:
            if one is not None and one not in known:
                known.add(one)
                waiting.append(one)
    return frozenset(node.name() for node in known)
