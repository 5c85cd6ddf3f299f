"""The parts of a replay: queries, arrangements of rows, names, what is not dropped."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DataParallel

from ddp_equivalence.observed_scripts.in_script.hooks import DROPOUTS, drop_nothing
from ddp_equivalence.observed_scripts.in_script.kept_tensors import ModuleNames, named_tensors
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


def test_without_dropout_attention_and_recurrent_layers_drop_nothing_either() -> None:
    attention = nn.functional.scaled_dot_product_attention
    kept = {name: getattr(nn.functional, name) for name in (*DROPOUTS, attention.__name__)}
    of_torch, of_recurrent = torch.dropout, nn.RNNBase.__init__
    query = torch.randn(2, 3, 4)
    expected = attention(query, query, query)
    try:
        drop_nothing()
        found = nn.functional.scaled_dot_product_attention
        assert torch.equal(found(query, query, query, None, 0.9, False), expected)
        assert torch.equal(found(query, query, query, dropout_p=0.9), expected)
        assert torch.equal(nn.Dropout(0.9)(query), query)
        recurrent = nn.LSTM(4, 5, num_layers=2, dropout=0.9)
        assert torch.equal(recurrent(query)[0], recurrent(query)[0])
    finally:
        for name, function in kept.items():
            setattr(nn.functional, name, function)
        torch.dropout = of_torch
        nn.RNNBase.__init__ = of_recurrent  # type: ignore[method-assign]
