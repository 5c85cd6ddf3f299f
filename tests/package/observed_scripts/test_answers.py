"""What one process answers arrives whole in the process that judges."""

from __future__ import annotations

import dataclasses
import json

from ddp_equivalence.observed_scripts.query import Answer, AnswerOfStep, Piece, Query, State


def test_every_field_of_an_answer_arrives() -> None:
    step = AnswerOfStep(
        2, "file", (1.5,), ("bias",), 1, (3, 4), (("one", "two"),), True, "bfloat16", (2.5,)
    )
    answer = Answer(7, (step,), {"randn": 2}, "operations", ("train.py:3",))
    for one in (step, answer):
        usual = {field.name: field.default for field in dataclasses.fields(one)}
        assert all(getattr(one, name) != value for name, value in usual.items())
    assert Answer.from_json(json.loads(answer.to_json())) == answer


def test_every_field_of_a_query_arrives() -> None:
    query = Query(
        7,
        (2, 3),
        ((Piece(0, 1, (5, 6)), Piece(1, 0)),),
        1,
        4,
        row_order="in blocks",
        logged="model",
        is_epoch=True,
        keep=True,
        state=State("file", ("one",)),
    )
    usual = {field.name: field.default for field in dataclasses.fields(query)}
    assert all(getattr(query, name) != value for name, value in usual.items())
    assert Query.from_json(query.to_json()) == query
