"""A backward pass that reaches parameters which another loss trains is shown by its line."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ddp_equivalence import Case
from tests.diagnosis.where.faulty import average, distance, unnamed


class Players(nn.Module):
    """A generator of rows, and a critic of them."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Linear(3, 6)
        self.critic = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))


def batch(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "real": torch.randn(16, 6, generator=generator),
        "noise": torch.randn(16, 3, generator=generator),
    }


def of_critic(model: Players, rows: dict[str, Tensor]) -> Any:
    made = model.generator(rows["noise"]).detach()
    return model.critic(made).exp().mean() - model.critic(rows["real"]).mean()


def of_generator(model: Players, rows: dict[str, Tensor]) -> Any:
    return -model.critic(model.generator(rows["noise"])).mean()


def both(model: Any, rows: dict[str, Tensor]) -> Any:
    """In the big batch, the critic's weights are constants in the loss of the generator."""
    weights = {name: one.detach() for name, one in model.critic.named_parameters()}
    made = model.generator(rows["noise"])
    judged = torch.func.functional_call(model.critic, weights, (made,))
    return of_critic(model, rows) - judged.mean()


GAME = Case(model=Players, batch=batch, loss=both, layout="1x4")


def generator_last(model: Any, rows: dict[str, Tensor], rank: Any) -> None:
    of_critic(model, rows).backward()
    of_generator(model, rows).backward()  # fault
    average(model)


def not_twice(model: Any, rows: dict[str, Tensor], rank: Any) -> None:
    of_critic(model, rows).backward()
    of_generator(model, rows).backward(inputs=list(model.generator.parameters()))
    average(model)
    model.critic[0].weight.grad *= 1.5


def one_element_is_wrong(model: Any, rows: dict[str, Tensor], rank: Any) -> None:
    penalty = model.critic[2].bias.square().sum()
    (both(model, rows) + penalty).backward()
    average(model)


def test_a_pass_that_reaches_the_parameters_of_another_loss_is_marked() -> None:
    found = unnamed(GAME, generator_last)
    assert "one backward pass too many" in found.headline
    assert all(name.startswith("critic.") for name in found.parameters)
    assert [one.is_fault for one in found.lines].count(True) == 1
    assert distance(found, generator_last) == 0


def test_no_pass_is_blamed_where_none_repairs_the_gradients() -> None:
    assert "one backward pass too many" not in unnamed(GAME, not_twice).headline


def test_of_one_element_it_is_not_said_how_often_a_term_counts() -> None:
    """Its gradient is always a multiple of the right one: that says nothing about the loss."""
    assert "counts" not in unnamed(GAME, one_element_is_wrong).headline
