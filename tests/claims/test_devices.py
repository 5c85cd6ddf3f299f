"""Which devices a process drives."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Rank
from ddp_equivalence.ranks.warm_ranks import on_ranks
from tests.claims.claim import Change, Table, claim


def refusal(rank: Rank, device_ids: list[int] | None) -> str:
    """What DDP says to these device_ids for a module on the CPU; "" if it takes them."""
    ids = [rank.local_rank] if device_ids == [-1] else device_ids
    try:
        ddp = DistributedDataParallel(nn.Linear(2, 2), device_ids=ids)
    except ValueError as error:
        return str(error)
    del ddp
    return ""


@claim(
    "false",
    device_ids=[0, 1],
    fails_when=Change("device_ids is left out", device_ids=None),
)
def test_one_process_gives_ddp_one_device(table: Table, device_ids: list[int] | None) -> None:
    """One process with two GPUs: DistributedDataParallel(model, device_ids=[0, 1]).

    Today's torch refuses it: device_ids has one element, or is left out. Start one process for each
    GPU. A model that lies on both GPUs is wrapped without device_ids.
    """
    answer = on_ranks("1x2", refusal, device_ids)[0]
    assert "device_ids can only be None or contain a single element" in answer
    table.add_row(device_ids="[0, 1]", result="ValueError: device_ids can only be None or ...")
    assert on_ranks("1x2", refusal, None)[0] == ""
    table.add_row(device_ids="left out", result="taken")


@claim(
    "false",
    device_ids=[-1],
    fails_when=Change("device_ids is left out", device_ids=None),
)
def test_device_ids_are_for_gpus_only(table: Table, device_ids: list[int] | None) -> None:
    """The tutorial's DDP(model, device_ids=[rank]) also runs on CPUs, if the backend is gloo.

    For a module on the CPU it raises ValueError, whatever the backend is, and although all
    processes are started. Leave device_ids out there.
    """
    answers = on_ranks("1x2", refusal, device_ids)
    for answer in answers:
        assert "device_ids" in answer
        assert "cpu" in answer
    table.add_row(device_ids="[rank]", result="ValueError on both processes")
    assert on_ranks("1x2", refusal, None) == ("", "")
    table.add_row(device_ids="left out", result="taken on both processes")


def ranks(rank: Rank) -> tuple[int, int]:
    """This process's rank, and its rank on its node."""
    return rank.rank, rank.local_rank


@claim(
    "true when all nodes have equally many GPUs with a process each, and ranks are numbered node "
    "by node",
    layouts=("1+3", "2x2-round-robin"),
    fails_when=Change("all nodes are alike and numbered in turn", layouts=("2x2", "1x4")),
)
def test_the_local_rank_is_not_always_a_remainder(table: Table, layouts: tuple[str, ...]) -> None:
    """The local rank is rank % GPUs per node.

    With nodes of one and three GPUs the three get the numbers 1, 2 and 0. Where ranks go round
    robin over two nodes, both processes of a node get the same GPU, and the other idles. torchrun
    sets LOCAL_RANK; read that.
    """
    for layout, per_node in (("2x2", 2), *zip(layouts, (3, 2), strict=True)):
        found = on_ranks(layout, ranks)
        right = all(local == rank % per_node for rank, local in found)
        assert right == (layout == "2x2")
        table.add_row(
            nodes_x_GPUs=layout,
            local_ranks=", ".join(str(local) for _, local in found),
            **{"rank % GPUs per node": ", ".join(str(rank % per_node) for rank, _ in found)},
        )
