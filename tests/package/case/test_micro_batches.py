"""A big batch that does not fit is computed in micro-batches, if these add up to the whole."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank, Verdict, check
from ddp_equivalence.case import micro_batches
from ddp_equivalence.reference import big_batch

pytestmark = pytest.mark.self_check

Batch = dict[str, Tensor]
TOTAL = 1_000_000
rows_in_memory = [0]


class WarmingUp(nn.Module):
    """Its loss counts more with each of its first calls."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.calls = Counted(), 0

    def forward(self, rows: Tensor) -> Any:
        self.calls += 1
        return min(1.0, self.calls / 10) * self.inside(rows)


class Counted(nn.Module):
    """Says how many rows are in its forward pass, before it calls its layers."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), *layers, nn.Linear(5, 3))

    def forward(self, rows: Tensor) -> Any:
        rows_in_memory[0] = len(rows)
        found = self.layers(rows)
        if not torch.is_grad_enabled():
            rows_in_memory[0] = 0
        return found


def batch(generator: torch.Generator) -> Batch:
    words = torch.randint(3, (8, 6), generator=generator)
    words[:, 3:] = -1
    words[2:4, 1:] = -1
    words[:2] = words[:2].clamp(min=0)
    return {"rows": torch.randn(8, 4, generator=generator), "words": words}


def mean(model: Any, batch: Batch) -> Any:
    return model(batch["rows"]).square().mean()


def total(model: Any, batch: Batch) -> Any:
    return model(batch["rows"]).square().sum()


def token_mean(model: Any, batch: Batch) -> Any:
    """The first two examples have as many words as each other, and the others have fewer."""
    logits = model(batch["rows"])[:, :, None].expand(-1, -1, 6)
    return nn.functional.cross_entropy(logits, batch["words"], ignore_index=-1)


def uniform_token_mean(model: Any, batch: Batch) -> Any:
    """With the weights of ``uniform`` every word has the same loss."""
    return token_mean(model, batch)


def uniform() -> nn.Module:
    model = Counted()
    for parameter in model.layers[-1].parameters():
        nn.init.zeros_(parameter)
    return model


def contrastive(model: Any, batch: Batch) -> Any:
    found = model(batch["rows"])
    return nn.functional.cross_entropy(found @ found.mT, torch.arange(len(found)))


def plain() -> nn.Module:
    return Counted()


def normalised() -> nn.Module:
    return Counted(nn.BatchNorm1d(5))


def dropped() -> nn.Module:
    return Counted(nn.Dropout(0.4))


def transposed() -> nn.Module:
    """The last of its weights does not lie in one piece, and is not moved."""
    model = Counted()
    model.layers[-1].weight = nn.Parameter(torch.randn(5, 3).mT)
    return model


def made_of(verdict: Verdict) -> int:
    assert verdict.analysis is not None
    return verdict.analysis.micro_batches


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Makes memory seem to be full as soon as more than so many rows are in a forward pass."""

    def is_for(most: int) -> None:
        def memory() -> Any:
            available = TOTAL if rows_in_memory[0] <= most else 0
            rows_in_memory[0] = 0
            return SimpleNamespace(total=TOTAL, available=available)

        rows_in_memory[0] = 0
        monkeypatch.setattr("psutil.virtual_memory", memory)
        monkeypatch.setattr(micro_batches, "ASKED_EVERY", 0.0)

    return is_for


@pytest.mark.parametrize(
    ("model", "loss", "most", "count"),
    [
        (plain, mean, 8, 1),
        (plain, mean, 4, 2),
        (plain, mean, 3, 4),
        (plain, mean, 1, 8),
        (plain, total, 3, 4),
        (plain, token_mean, 3, 1),
        (plain, contrastive, 3, 1),
        (uniform, uniform_token_mean, 3, 1),
        (WarmingUp, mean, 3, 1),
        (transposed, mean, 3, 1),
        (normalised, mean, 3, 1),
        (dropped, mean, 3, 1),
    ],
    ids=lambda one: getattr(one, "__name__", str(one)),
)
def test_micro_batches_are_taken_where_they_add_up(
    model: Any, loss: Any, most: int, count: int, room: Callable[[int], None]
) -> None:
    case = Case(model=model, batch=batch, loss=loss, layout="1x2")
    whole = big_batch(case)
    assert whole.micro_batches.count == 1
    room(most)
    found = big_batch(case)
    assert found.micro_batches.count == count
    assert found.losses == pytest.approx(whole.losses, rel=1e-12)
    for key, expected in whole.expected.items():
        assert expected is not None
        torch.testing.assert_close(found.expected[key], expected, rtol=1e-10, atol=1e-14)
    for name, buffer in whole.buffers.items():
        assert torch.equal(found.buffers[name], buffer)


def test_a_check_says_in_how_many_micro_batches_the_big_batch_was_computed(
    room: Callable[[int], None],
) -> None:
    def ddp(model: Any, shard: Batch, rank: Rank) -> None:
        wrapper = DistributedDataParallel(model)
        mean(wrapper, shard).backward()

    def summed(model: Any, shard: Batch, rank: Rank) -> None:
        wrapper = DistributedDataParallel(model)
        (2 * mean(wrapper, shard)).backward()

    room(3)
    case = Case(model=plain, batch=batch, loss=mean, layout="1x2", dtype=torch.float32)
    verdict = check(case, ddp)
    assert (verdict.outcome, made_of(verdict)) == ("same", 4), verdict
    assert "computed in 4 micro-batches" in " ".join(verdict.full_report().split())
    verdict = check(case, summed)
    assert (verdict.outcome, made_of(verdict)) == ("different", 4), verdict
    assert "every gradient is 2 times" in str(verdict)


def test_what_other_processes_take_ends_no_forward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """There was no room before the first module was called, so micro-batches would not help."""
    full = SimpleNamespace(total=TOTAL, available=0)
    monkeypatch.setattr("psutil.virtual_memory", lambda: full)
    monkeypatch.setattr(micro_batches, "ASKED_EVERY", 0.0)
    case = Case(model=plain, batch=batch, loss=mean, layout="1x2")
    assert big_batch(case).micro_batches.count == 1


@pytest.mark.parametrize("how", ["compiled", "scripted", "functional"])
def test_a_model_that_is_compiled_or_called_by_a_transform_is_watched_without_a_word(
    how: str, room: Callable[[int], None], recwarn: pytest.WarningsRecorder
) -> None:
    def of(model: Any, batch: Batch) -> Any:
        if how == "compiled":
            return mean(torch.compile(model.layers, backend="eager", fullgraph=True), batch)
        if how == "scripted":
            return mean(torch.jit.script(model.layers), batch)
        weights = dict(model.named_parameters())
        return mean(lambda rows: torch.func.functional_call(model, weights, (rows,)), batch)

    room(8)
    found = big_batch(Case(model=plain, batch=batch, loss=of, layout="1x2"))
    assert found.micro_batches.count == 1
    assert not [one for one in recwarn if "hook" in str(one.message)]


def test_several_steps_are_computed_as_a_whole(room: Callable[[int], None]) -> None:
    """Nobody would see that the micro-batches of a later one do not add up."""
    room(3)
    found = big_batch(Case(model=plain, batch=batch, loss=mean, layout="1x2"), steps=2)
    assert found.micro_batches.count == 1


def test_a_batch_that_a_function_deals_is_computed_as_a_whole(room: Callable[[int], None]) -> None:
    def with_a_number(generator: torch.Generator) -> Batch:
        return {"temperature": torch.tensor(2.0), **batch(generator)}

    def deal(whole: Batch, rows: list[int]) -> Batch:
        chosen = {name: leaf[rows] for name, leaf in whole.items() if name != "temperature"}
        return {"temperature": whole["temperature"], **chosen}

    room(3)
    case = Case(model=plain, batch=with_a_number, loss=mean, batch_dims=deal, examples=8)
    assert big_batch(case).micro_batches.count == 1
