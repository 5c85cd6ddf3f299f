"""One process draws, for the rows of several ranks, the random numbers that each rank drew."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ddp_equivalence.observed_scripts.in_script.draws import (
    RankGenerators,
    Source,
    follow_restored_states,
    generator_states,
    set_generator_states,
)
from ddp_equivalence.observed_scripts.in_script.script_changes import let_torch_draw
from ddp_equivalence.observed_scripts.queries import RowOrder
from ddp_equivalence.observed_scripts.record import GeneratorStates, same_states

Drawn = tuple[GeneratorStates, Tensor]
"""The state of the generators before something was drawn, and what was drawn."""


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> str:
    """Where numbers are drawn."""
    if request.param == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("NOT RUN: this machine has no CUDA device")
        torch.ones(1, device="cuda")  # the process has used it
    return str(request.param)


def drawn_by(seed: int, draw: Callable[[], Tensor]) -> Drawn:
    """What one rank draws."""
    torch.manual_seed(seed)
    states = generator_states()
    return states, draw()


def drawn_by_each(draw: Callable[[], Tensor]) -> tuple[list[GeneratorStates], list[Tensor]]:
    """The states of two ranks, and what they draw."""
    first, second = drawn_by(1, draw), drawn_by(2, draw)
    assert not torch.equal(first[1], second[1])
    return [first[0], second[0]], [first[1], second[1]]


@contextmanager
def drawing(sources: Sequence[Source], row_order: RowOrder = "by row") -> Iterator[RankGenerators]:
    """Inside the block, this process draws for these."""
    generators = RankGenerators()
    generators.begin()
    generators.use(sources, True, row_order)
    try:
        yield generators
    finally:
        generators.forget()
        generators.__exit__(None, None, None)  # type: ignore[no-untyped-call]


def whole(states: Sequence[GeneratorStates], count: int) -> list[Source]:
    """All rows of every rank."""
    return [Source(state, count, None) for state in states]


def test_the_rows_of_a_rank_alone_are_drawn_by_the_default_generators(device: str) -> None:
    states, masks = drawn_by_each(lambda: torch.rand(3, 40, device=device))
    with drawing([Source(states[1], 3, None)]):
        assert torch.equal(torch.rand(3, 40, device=device), masks[1])


def fused_dropout(ones: Tensor) -> Tensor:
    """The operation that ``dropout`` is on a GPU: what is kept, and the mask."""
    kept, mask = torch.native_dropout(ones, 0.5, True)
    return torch.stack([kept, mask.to(kept.dtype)], dim=1)


LIKE: dict[str, Callable[[Tensor], Tensor]] = {
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "bernoulli": lambda ones: torch.bernoulli(0.5 * ones),
    "randint_like": lambda ones: torch.randint_like(ones, 50),
    "randint_like from": lambda ones: torch.randint_like(ones, 10, 50),
    "normal": lambda ones: torch.normal(ones, 2.0),
    "normal of two": lambda ones: torch.normal(ones, ones),
    "normal of a size": lambda ones: torch.normal(0.0, 1.0, tuple(ones.shape), device=ones.device),
    "bernoulli in place": lambda ones: ones.clone().bernoulli_(0.5 * ones),
    "multinomial": lambda ones: torch.multinomial(ones, 20),
    "dropout": lambda ones: nn.functional.dropout(ones, 0.5),
    "native_dropout": fused_dropout,
}
"""What is drawn with the rows of another tensor."""


@pytest.mark.parametrize("name", LIKE)
def test_what_is_drawn_like_a_tensor_is_drawn_for_its_rows(name: str, device: str) -> None:
    draw = LIKE[name]
    states, found = drawn_by_each(lambda: draw(torch.ones(2 * 3, 40, device=device)))
    with drawing(whole(states, 2)) as generators:
        both = draw(torch.ones(4 * 3, 40, device=device))
        assert torch.equal(both, torch.cat(found))
        generators.use([Source(states[1], 2, (1, 0)), Source(states[0], 2, (1,))], draws=True)
        some = draw(torch.ones(3 * 3, 40, device=device))
        first, second = (one.reshape(2, 3, *one.shape[1:]) for one in found)
        assert torch.equal(some, torch.cat([second[1], second[0], first[1]]))
        assert generators.missed == {}


def test_a_probability_of_each_row_goes_with_its_row(device: str) -> None:
    chance = torch.tensor([0.0, 0.5, 1.0], device=device)[:, None].expand(3, 40)
    states, found = drawn_by_each(lambda: torch.bernoulli(chance))
    sources = [Source(states[0], 3, (2, 1)), Source(states[1], 3, (0, 1))]
    with drawing(sources):
        joined = torch.bernoulli(torch.stack([chance[2], chance[1], chance[0], chance[1]]))
    wanted = [found[0][2], found[0][1], found[1][0], found[1][1]]
    assert torch.equal(joined, torch.stack(wanted))
    assert joined[0].all()
    assert not joined[2].any()


@pytest.mark.parametrize("rows", [None, (1,)], ids=["all rows", "some rows"])
def test_entries_of_a_row_may_stand_in_blocks(rows: tuple[int, ...] | None, device: str) -> None:
    """Such as the crops of an image: the first crops of all images, then the second ones."""
    drop = nn.Dropout(0.5)
    states, masks = drawn_by_each(lambda: drop(torch.ones(2 * 2, 40, device=device)))
    first, second = (mask.reshape(2, 2, 40) for mask in masks)
    second = second if rows is None else second[:, list(rows)]
    wanted = torch.cat([first, second], dim=1).reshape(-1, 40)
    with drawing([Source(states[0], 2, None), Source(states[1], 2, rows)], row_order="in blocks"):
        assert torch.equal(drop(torch.ones(len(wanted), 40, device=device)), wanted)


@pytest.mark.parametrize(
    "length", [5, 4, 8], ids=["not ambiguous", "as many rows", "twice as many"]
)
def test_a_sequence_model_may_have_its_rows_in_dim_1(length: int, device: str) -> None:
    """Dim 0 is the time. Its length may be a multiple of the number of rows by chance."""
    drop = nn.Dropout(0.5)
    states, masks = drawn_by_each(lambda: drop(torch.ones(length, 2, 40, device=device)))
    sources = [Source(states[0], 2, None), Source(states[1], 2, (1, 0))]
    with drawing(sources, "in dim 1") as generators:
        both = drop(torch.ones(length, 4, 40, device=device))
        assert torch.equal(both, torch.cat([masks[0], masks[1].flip(1)], dim=1))
        assert generators.missed == {}


def test_what_every_rank_drew_alike_is_drawn_again_though_it_is_no_rows(device: str) -> None:
    """Such as a number that decides whether a layer is skipped. The device has two names."""
    drop = nn.Dropout(0.5)
    same_device = "cpu:0" if device == "cpu" else "cuda"

    def draw() -> Tensor:
        number = torch.rand([], device=same_device)
        return torch.cat([number[None], drop(torch.ones(3 * 40, device=device))])

    (state, other), (of_first, of_second) = drawn_by_each(draw)
    before = generator_states()
    with drawing(whole([state, state], 3)) as generators:
        assert torch.rand([], device=same_device) == of_first[0]
        both = drop(torch.ones(6 * 40, device=device))
        assert torch.equal(both, torch.cat([of_first[1:], of_first[1:]]))
        assert generators.missed == {}
        generators.use(whole([state, other], 3), draws=True)
        torch.rand([], device=device)
        assert generators.missed == {"aten.rand.default": 1}
        both = drop(torch.ones(6 * 40, device=device))
        assert torch.equal(both, torch.cat([of_first[1:], of_second[1:]]))
        torch.randperm(5, device=device)
        assert sum(generators.missed.values()) == 2
    assert same_states(generator_states(), before), "this process has drawn itself"


def test_dropout_of_a_tensor_that_is_transposed_in_memory_is_drawn_in_that_order(
    device: str,
) -> None:
    def drop(rows: int) -> Tensor:
        ones = torch.ones(4, rows, 30, device=device)
        return nn.functional.dropout(ones.transpose(0, 1), 0.5)

    states, masks = drawn_by_each(lambda: drop(2))
    with drawing(whole(states, 2)):
        assert torch.equal(drop(4), torch.cat(masks))


def test_a_record_without_a_gpu_leaves_the_generator_of_a_gpu_alone(device: str) -> None:
    of_cpu = {"cpu": generator_states()["cpu"]}
    torch.rand(3, device=device)
    after = generator_states()
    set_generator_states(of_cpu)
    assert same_states(generator_states(), after | of_cpu)
    states = [of_cpu, of_cpu]
    with drawing(whole(states, 3)) as generators:
        torch.rand(6, 40, device=device)
        assert generators.missed == ({"aten.rand.default": 1} if device == "cuda" else {})


def test_an_attention_without_dropout_is_left_alone(device: str) -> None:
    query = torch.randn(4, 2, 8, 16, device=device)
    attention = nn.functional.scaled_dot_product_attention
    alone = attention(query, query, query)
    with drawing(whole([generator_states(), generator_states()], 2)) as generators:
        assert torch.equal(attention(query, query, query), alone)
        assert generators.missed == {}


def test_dropout_inside_a_recurrent_layer_is_drawn_for_its_rows(
    device: str,
) -> None:
    torch.manual_seed(0)
    layer = nn.LSTM(4, 30, num_layers=2, dropout=0.5, batch_first=True).to(device)
    let_torch_draw(layer)
    rows = torch.randn(3, 5, 4, device=device)

    states, found = drawn_by_each(lambda: layer(rows)[0].detach())
    with drawing(whole(states, 3), "in dim 1") as generators:
        both = layer(torch.cat([rows, rows]))[0]
        assert generators.missed == {}
    torch.testing.assert_close(both, torch.cat(found))


def test_noise_that_belongs_to_no_row_is_the_same_for_all_rows(device: str) -> None:
    """Its shape may have as many rows by chance, such as that of a weight to which it is added."""
    state, found = drawn_by(1, lambda: torch.randn(6, 40, device=device))
    with drawing(whole([state, state], 3), "no rows") as generators:
        assert torch.equal(torch.randn(6, 40, device=device), found)
        assert generators.missed == {}


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_is_computed_again_in_the_backward_pass_drops_the_same(
    reentrant: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As activation checkpointing does, which restores the state of the generator for that."""
    for module in (torch, torch.random):
        for name in ("get_rng_state", "set_rng_state"):
            monkeypatch.setattr(module, name, getattr(module, name))  # is put back

    def drop(rows: Tensor) -> Tensor:
        return nn.functional.dropout(rows.tanh(), 0.5)

    states, found = drawn_by_each(lambda: drop(torch.ones(3, 40, device=device)))
    rows = torch.ones(6, 40, device=device, requires_grad=True)
    with drawing(whole(states, 3)) as generators:
        follow_restored_states(generators)
        first = checkpoint(drop, rows, use_reentrant=reentrant)
        second = checkpoint(drop, rows, use_reentrant=reentrant)
        assert torch.equal(first.detach(), torch.cat(found))
        (first + 2 * second).sum().backward()
        third = drop(rows.detach())
    slope = 2.0 * (1 - torch.tanh(torch.tensor(1.0, device=device)) ** 2)
    expected = ((first != 0) * 1.0 + (second != 0) * 2.0) * slope
    torch.testing.assert_close(rows.grad, expected)
    with drawing(whole(states, 3)):  # the backward pass has not moved what comes next
        drop(rows.detach())
        drop(rows.detach())
        assert torch.equal(third, drop(rows.detach()))
