"""A layout is a table of ranks, and every rank sees the environment that torchrun would set."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch.distributed.elastic.agent.server import local_elastic_agent

from ddp_equivalence import BadCase, Case, Rank
from ddp_equivalence.case.layouts import RankPlace, parse
from ddp_equivalence.ranks import pickling
from ddp_equivalence.ranks.environment import DEFAULTS, torchrun_environment
from ddp_equivalence.ranks.lanes import choose
from ddp_equivalence.ranks.warm_ranks import warm_ranks


@pytest.mark.parametrize(
    ("name", "nodes", "local_ranks"),
    [
        ("1x1", (0,), (0,)),
        ("1x4", (0, 0, 0, 0), (0, 1, 2, 3)),
        ("2x2", (0, 0, 1, 1), (0, 1, 0, 1)),
        ("4x1", (0, 1, 2, 3), (0, 0, 0, 0)),
        ("1+3", (0, 1, 1, 1), (0, 0, 1, 2)),
        ("3+1", (0, 0, 0, 1), (0, 1, 2, 0)),
        ("2x2-round-robin", (0, 1, 0, 1), (0, 0, 1, 1)),
        ("1+3-round-robin", (0, 1, 1, 1), (0, 0, 1, 2)),
    ],
)
def test_a_layout_is_a_table_of_ranks(
    name: str, nodes: tuple[int, ...], local_ranks: tuple[int, ...]
) -> None:
    layout = parse(name)
    assert tuple(row.rank for row in layout.rows) == tuple(range(len(nodes)))
    assert tuple(row.node for row in layout.rows) == nodes
    assert tuple(row.local_rank for row in layout.rows) == local_ranks
    assert all(row.local_world_size == nodes.count(row.node) for row in layout.rows)
    assert {row.world_size for row in layout.rows} == {len(nodes)}
    assert layout.nodes == len(set(nodes))


@pytest.mark.parametrize(
    "name", ["2xx2", "", "x", "0x2", "2x0", "2x-1", "1+0", "+1", "1+", "2", "2X2", "²x2", "9x9x9"]
)
def test_an_unknown_layout_is_refused_by_name(name: str) -> None:
    with pytest.raises(BadCase, match="nodes x ranks per node") as caught:
        Case(model="mlp", loss="mse_mean", layout=name)
    assert caught.value.field == "layout"
    assert caught.value.value == name


def test_a_layout_of_too_many_ranks_is_refused() -> None:
    with pytest.raises(BadCase, match="at most 4096 ranks, not 9000"):
        parse("3000x3")


def test_the_environment_is_the_one_that_torchrun_sets() -> None:
    row = RankPlace(rank=2, node=1, local_rank=1, local_world_size=3, world_size=4, nodes=2)
    environment = torchrun_environment(row, port=1234)
    expected = {
        "RANK": "2",
        "LOCAL_RANK": "1",
        "GROUP_RANK": "1",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "3",
        "GROUP_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1234",
    }
    assert expected.items() <= environment.items()


def test_no_variable_that_torchrun_sets_is_left_out() -> None:
    """Read from torch's own agent, so that a new one is noticed with an upgrade."""
    source = inspect.getsource(local_elastic_agent.LocalElasticAgent._start_workers)
    names = set(re.findall(r'^ +"([A-Z_]+)": ', source, re.MULTILINE))
    assert {"RANK", "MASTER_PORT", "TORCHELASTIC_RUN_ID"} <= names
    assert names <= {*torchrun_environment(parse("2x2").rows[0], port=1), *DEFAULTS}


def look_around(rank: Rank, names: tuple[str, ...]) -> Iterator[object]:
    import os

    group = dist.get_rank(), dist.get_world_size(), dist.get_backend()
    yield rank, group, {name: os.environ.get(name) for name in names}


def test_every_rank_finds_itself_where_the_table_says() -> None:
    layout = parse("1+3")
    names = tuple(torchrun_environment(layout.rows[0], 0))
    with warm_ranks().acquire(layout, choose(layout, "gloo"), 30.0) as ranks:
        ranks.submit(pickling.dumps(look_around, names))
        answers = dict(ranks.collect(60.0))
    assert sorted(answers) == [0, 1, 2, 3]
    ports = {environment["MASTER_PORT"] for _, _, environment in answers.values()}
    assert len(ports) == 1
    for row in layout.rows:
        rank, group, environment = answers[row.rank]
        assert group == (row.rank, 4, "gloo")
        assert (rank.node, rank.local_rank, rank.nodes) == (row.node, row.local_rank, 2)
        assert environment == torchrun_environment(row, int(ports.copy().pop()))
