"""What doctor says of the nodes that NCCL counts. The count is given."""

from __future__ import annotations

import pytest

from ddp_equivalence.commands.doctor import examination
from ddp_equivalence.commands.doctor.machine import Outcome
from ddp_equivalence.ranks.failure import RankFailed, RanksTimedOut


@pytest.fixture(autouse=True)
def no_host_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_HOSTID", raising=False)


@pytest.mark.parametrize(
    ("counted", "outcome"), [(2, Outcome.WORKS), (1, Outcome.WRONG), (None, Outcome.NOT_RUN)]
)
def test_two_nodes_must_be_counted(
    counted: int | None, outcome: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examination, "nodes_counted", lambda layout: counted)
    assert examination.node_state().outcome is outcome


@pytest.mark.parametrize("error", [RankFailed("NCCL error\nmore"), RanksTimedOut("rank 1 is late")])
def test_ranks_that_fail_are_no_answer(error: RankFailed, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(layout: object) -> int:
        raise error

    monkeypatch.setattr(examination, "nodes_counted", fails)
    state = examination.node_state()
    assert (state.outcome, state.text) == (Outcome.FAILED, str(error).splitlines()[0])


def test_one_host_that_the_user_has_set_is_not_asked_about(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_HOSTID", "one")
    state = examination.node_state()
    assert state.outcome is Outcome.NOT_RUN
    assert "NCCL_HOSTID is set" in state.text
