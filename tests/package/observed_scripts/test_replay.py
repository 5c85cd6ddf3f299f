"""The parts of a replay: queries, arrangements of rows, random numbers, names."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DataParallel

from ddp_equivalence.observed_scripts.in_script.names import ModuleNames, named_tensors
from ddp_equivalence.observed_scripts.in_script.no_dropout import DROPOUTS, drop_nothing
from ddp_equivalence.observed_scripts.in_script.rank_generators import RankGenerators, Source
from ddp_equivalence.observed_scripts.query import Piece, Query
from ddp_equivalence.observed_scripts.record import Row, pieces_of

COUNTS = {(0, 0): 3, (1, 0): 2}


def test_a_query_travels_as_json() -> None:
    query = Query(7, (0, 1), ((Piece(0, 0, (2, 1)), Piece(1, 0)),), weights_of=1, nudge=2)
    assert Query.from_json(query.to_json()) == query
    assert query.ranks == (0, 1)


def test_whole_micro_batches_are_asked_for_whole() -> None:
    rows = [Row(0, 0, 0), Row(0, 0, 1), Row(0, 0, 2), Row(1, 0, 0), Row(1, 0, 1)]
    assert pieces_of(rows, COUNTS) == (Piece(0, 0), Piece(1, 0))
    assert pieces_of(rows[1:4], COUNTS) == (Piece(0, 0, (1, 2)), Piece(1, 0, (0,)))
    assert pieces_of(rows[::-1], COUNTS) == (Piece(1, 0, (1, 0)), Piece(0, 0, (2, 1, 0)))
    assert pieces_of([Row(1, 0, None)], COUNTS) == (Piece(1, 0),)


def drawn_by(seed: int, draw: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The state of a generator, and what is drawn from it."""
    torch.manual_seed(seed)
    state = torch.get_rng_state()
    return state, draw()


def test_one_process_drops_for_each_row_what_its_rank_dropped() -> None:
    drop = nn.Dropout(0.5)
    states, masks = zip(
        *(drawn_by(seed, lambda: drop(torch.ones(3, 40))) for seed in (1, 2)), strict=True
    )
    generators = RankGenerators()
    generators.use([Source(states[0], 3, None), Source(states[1], 3, None)], draws=True)
    try:
        both = drop(torch.ones(6, 40))
        assert torch.equal(both, torch.cat(masks))
        generators.use([Source(states[1], 3, (2, 0)), Source(states[0], 3, (1,))], draws=True)
        some = drop(torch.ones(3, 40))
        assert torch.equal(some, torch.stack([masks[1][2], masks[1][0], masks[0][1]]))
        generators.use([Source(states[0], 3, None), Source(states[1], 3, None)], draws=True)
        torch.randperm(5)
        assert sum(generators.missed.values()) == 1  # it draws no rows
    finally:
        generators.forget()
        generators.__exit__(None, None, None)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("rows", [None, (1,)], ids=["all rows", "some rows"])
def test_entries_of_a_row_may_stand_in_blocks(rows: tuple[int, ...] | None) -> None:
    """Such as the crops of an image: the first crops of all images, then the second ones."""
    drop = nn.Dropout(0.5)
    states, masks = zip(
        *(drawn_by(seed, lambda: drop(torch.ones(2 * 2, 40))) for seed in (1, 2)), strict=True
    )
    generators = RankGenerators()
    generators.use([Source(states[0], 2, None), Source(states[1], 2, rows)], True, in_blocks=True)
    first, second = (mask.reshape(2, 2, 40) for mask in masks)
    second = second if rows is None else second[:, list(rows)]
    wanted = torch.cat([first, second], dim=1).reshape(-1, 40)
    try:
        assert torch.equal(drop(torch.ones(len(wanted), 40)), wanted)
    finally:
        generators.forget()
        generators.__exit__(None, None, None)  # type: ignore[no-untyped-call]


def test_what_is_drawn_like_a_tensor_may_stand_in_blocks_too() -> None:
    probability = torch.rand(2 * 4, 3)
    of_rank = probability.reshape(2, 4, 3).split(2, dim=1)
    states, masks = zip(
        *(
            drawn_by(seed, partial(torch.bernoulli, of_rank[seed - 1].reshape(4, 3)))
            for seed in (1, 2)
        ),
        strict=True,
    )
    generators = RankGenerators()
    generators.use([Source(state, 2, None) for state in states], True, in_blocks=True)
    try:
        wanted = torch.cat([mask.reshape(2, 2, 3) for mask in masks], dim=1).reshape(-1, 3)
        assert torch.equal(torch.bernoulli(probability), wanted)
    finally:
        generators.forget()
        generators.__exit__(None, None, None)  # type: ignore[no-untyped-call]


def test_what_every_rank_drew_alike_is_drawn_again_though_it_is_no_rows() -> None:
    """Such as a number that decides whether a layer is skipped."""
    drop = nn.Dropout(0.5)

    def draw() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.rand([]), drop(torch.ones(3, 40))

    state, (number, mask) = drawn_by(1, draw)
    other, (_, other_mask) = drawn_by(2, draw)
    generators = RankGenerators()
    try:
        generators.use([Source(state, 3, None), Source(state, 3, None)], draws=True)
        assert torch.rand([]) == number
        assert torch.equal(drop(torch.ones(6, 40)), torch.cat([mask, mask]))
        assert generators.missed == {}
        generators.use([Source(state, 3, None), Source(other, 3, None)], draws=True)
        torch.rand([])
        assert generators.missed == {"aten.rand.default": 1}
        assert torch.equal(drop(torch.ones(6, 40)), torch.cat([mask, other_mask]))
    finally:
        generators.forget()
        generators.__exit__(None, None, None)  # type: ignore[no-untyped-call]


def test_what_a_script_does_not_draw_is_not_missed() -> None:
    generators = RankGenerators()
    state = torch.get_rng_state()
    generators.use([Source(state, 3, None), Source(state, 3, None)], draws=True)
    try:
        with torch.inference_mode():  # then torch does not take a dropout apart
            nn.functional.dropout(torch.ones(5), 0.1, training=False)
        assert generators.missed == {}
    finally:
        generators.forget()
        generators.__exit__(None, None, None)  # type: ignore[no-untyped-call]


def test_noise_of_another_shape_in_each_row_is_drawn_for_its_rank() -> None:
    states, noise = zip(
        *(drawn_by(seed, lambda: torch.randn(2 * 5, 3)) for seed in (3, 4)), strict=True
    )
    generators = RankGenerators()
    generators.use([Source(state, 2, None) for state in states], draws=True)
    try:
        assert torch.equal(torch.randn(4 * 5, 3), torch.cat(noise))
    finally:
        generators.forget()
        generators.__exit__(None, None, None)  # type: ignore[no-untyped-call]


def test_names_do_not_depend_on_wrappers() -> None:
    inner = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    plain = nn.ModuleDict({"module": inner})  # an attribute that is called like a wrapper's
    wrapped = nn.ModuleDict({"module": DataParallel(inner)})
    names = [name for name, _ in named_tensors(plain)]
    assert "module.0.weight" in names
    assert "module.1.running_mean" in names
    assert [name for name, _ in named_tensors(wrapped)] == names
    assert [name for name, _ in named_tensors(DataParallel(plain))] == names


def test_modules_of_one_class_are_told_apart_by_their_first_call() -> None:
    names = ModuleNames()
    first, second = nn.Linear(1, 1), nn.Linear(1, 1)
    assert names.of(first) == "Linear"
    assert names.of(DataParallel(second)) == "Linear#1"
    assert names.of(second) == "Linear#1"
    assert [name for name, _ in names.learn_parameters("Linear")] == [
        "Linear:weight",
        "Linear:bias",
    ]
    assert names.learn_parameters("Linear") == []
    assert names.of_parameter(first.weight) == "Linear:weight"
    assert names.of_parameter(second.weight) is None


def test_dropout_of_a_tensor_that_is_transposed_in_memory_is_drawn_in_that_order() -> None:
    def drop(rows: int) -> torch.Tensor:
        return nn.functional.dropout(torch.ones(4, rows, 3).transpose(0, 1), 0.5)

    states, masks = zip(*(drawn_by(seed, lambda: drop(2)) for seed in (5, 6)), strict=True)
    generators = RankGenerators()
    generators.use([Source(state, 2, None) for state in states], draws=True)
    try:
        assert torch.equal(drop(4), torch.cat(masks))
    finally:
        generators.forget()
        generators.__exit__(None, None, None)  # type: ignore[no-untyped-call]


def test_without_dropout_attention_drops_nothing_wherever_its_probability_stands() -> None:
    attention = nn.functional.scaled_dot_product_attention
    kept = {name: getattr(nn.functional, name) for name in (*DROPOUTS, attention.__name__)}
    of_torch = torch.dropout
    query = torch.randn(2, 3, 4)
    expected = attention(query, query, query)
    try:
        drop_nothing()
        found = nn.functional.scaled_dot_product_attention
        assert torch.equal(found(query, query, query, None, 0.9, False), expected)
        assert torch.equal(found(query, query, query, dropout_p=0.9), expected)
        assert torch.equal(nn.Dropout(0.9)(query), query)
    finally:
        for name, function in kept.items():
            setattr(nn.functional, name, function)
        torch.dropout = of_torch
