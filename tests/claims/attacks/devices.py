"""The number of a process on its node."""

from __future__ import annotations

from tests.claims.attacks.attack import attack


@attack(
    "the_local_rank_is_not_always_a_remainder",
    draw=lambda draw: {"nodes": [draw.randint(1, 8)] * draw.randint(1, 6)},
    outside=[{"nodes": [1, 3]}, {"nodes": [2, 2], "round_robin": True}],
)
def the_local_rank_is_a_remainder(nodes: list[int], round_robin: bool = False) -> bool:
    places = [(node, local) for node, gpus in enumerate(nodes) for local in range(gpus)]
    if round_robin:
        places.sort(key=lambda place: place[1])
    return all(local == rank % max(nodes) for rank, (_, local) in enumerate(places))
