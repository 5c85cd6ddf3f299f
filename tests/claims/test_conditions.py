"""Random set-ups attack the condition of each claim, and counter-examples break it.

An attack shares no code with the claim's test. Where DDP itself is in question it runs on real
ranks; elsewhere ranks are simulated in one process with autograd, and samplers are torch's own. A
counter-example lies outside the condition, and there the same check must fail. Claims without a
number to vary are listed with the reason.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.claims import page
from tests.claims.attacks import devices, gradients, learning_rates, real_ranks, samplers, training
from tests.claims.attacks.attack import Attack, Draw, attacks_of

FEW, MANY = 40, 200
"""How many set-ups attack a condition in every run, and in a thorough one."""

NOT_ATTACKED = {
    "test_init_process_group_starts_no_second_process": "a number of processes that hangs has no "
    "condition; the test itself waits for one that never comes",
    "test_device_ids_are_for_gpus_only": "there is one CPU to name",
    "test_one_process_gives_ddp_one_device": "torch refuses it before it looks at numbers",
    "test_equal_gradients_can_train_worse": "it is a list of suspects, each measured",
}

ATTACKS = attacks_of(devices, gradients, learning_rates, real_ranks, samplers, training)


def cases() -> list[Any]:
    return [pytest.param(one, id=one.holds.__name__) for one in ATTACKS]


@pytest.mark.parametrize("setups", [FEW, pytest.param(MANY, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("one", cases())
def test_the_condition_holds_in_random_set_ups(one: Attack, setups: int) -> None:
    seed = random.randrange(10**9)
    draw = Draw(seed)
    for _ in range(setups):
        setup = one.draw(draw)
        assert one.holds(**setup), (seed, setup)


@pytest.mark.parametrize("one", cases())
def test_the_check_fails_outside_the_condition(one: Attack) -> None:
    assert one.outside
    for setup in one.outside:
        assert not one.holds(**setup), setup


def test_every_claim_is_attacked_or_says_why_not() -> None:
    attacked = {claim for one in ATTACKS for claim in one.claims}
    assert not attacked & set(NOT_ATTACKED)
    assert attacked | set(NOT_ATTACKED) == {claim.name for claim in page.claims()}
