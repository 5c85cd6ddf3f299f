"""What ``--like`` says of a trainer is what the installed trainer does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, SequentialSampler

from ddp_equivalence import Case, check
from ddp_equivalence.commands.explain import Setup, explain, setup_like
from ddp_equivalence.commands.explain.explanation import last_step_counts
from ddp_equivalence.commands.explain.setup import DEFAULTS

RANKS, BATCH, ACCUMULATION = 2, 2, 2
EXAMPLES = RANKS * BATCH * ACCUMULATION


LIBRARIES = {
    "hf-trainer": ("transformers", "accelerate"),
    "accelerate": ("accelerate",),
    "lightning": ("lightning",),
}


def needs(*libraries: str) -> None:
    for library in libraries:
        if find_spec(library) is None:
            pytest.skip(f'needs {library}: pip install ".[trainers]"')


def like(name: str, **given: Any) -> Setup:
    sizes = {"ranks_per_node": RANKS, "batch": BATCH, "accumulation": ACCUMULATION}
    return setup_like(name, **sizes | given)


def outcome_of(setup: Setup) -> str:
    """What a check of the trainer must find, if the explanation is right."""
    explanation = explain(setup)
    return "same" if explanation.is_multiple and explanation.factor == 1 else "different"


@pytest.mark.parametrize(
    ("given", "averages"),
    [({}, True), ({"tokens_over": "all-ranks"}, True), ({"tokens_over": "step"}, False)],
)
def test_the_trainer_of_transformers_counts_tokens(given: dict[str, Any], averages: bool) -> None:
    needs(*LIBRARIES["hf-trainer"])
    from ddp_equivalence.adapters.transformers import trainer_step
    from examples import trainer_of_transformers as language_model

    step = trainer_step(
        gradient_accumulation_steps=ACCUMULATION, average_tokens_across_devices=averages
    )
    verdict = check(language_model.case, step, compare="update")
    assert verdict.outcome == outcome_of(like("hf-trainer", **given))
    assert (verdict.outcome == "same") == averages


class Regression(nn.Module):
    """Returns its own mean loss, as models for transformers do, and takes no token count."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(7, 11), nn.Tanh(), nn.Linear(11, 5))

    def forward(self, rows: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.mse_loss(self.layers(rows), labels)}


def rows(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "rows": torch.randn(EXAMPLES, 7, generator=generator),
        "labels": torch.randn(EXAMPLES, 5, generator=generator),
    }


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    value: Tensor = model(**batch)["loss"]
    return value


@dataclass
class Loop:
    """The loop of Accelerate's own documentation."""

    loss: Callable[..., Tensor]

    def __call__(self, accelerator: Any, model: nn.Module, optimizer: Any, loader: Any) -> None:
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(self.loss(model, batch))
                optimizer.step()
                optimizer.zero_grad()


def trainer_step_of(name: str, loss: Callable[..., Tensor] = loss) -> Any:
    if name == "hf-trainer":
        from ddp_equivalence.adapters.transformers import trainer_step

        return trainer_step(gradient_accumulation_steps=ACCUMULATION)
    if name == "accelerate":
        from ddp_equivalence.adapters.accelerate import accelerate_step

        return accelerate_step(Loop(loss), gradient_accumulation_steps=ACCUMULATION)
    from ddp_equivalence.adapters.lightning import lightning_step

    return lightning_step(loss, accumulate_grad_batches=ACCUMULATION)


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_mean_loss_gives_the_big_batchs_update(name: str) -> None:
    needs(*LIBRARIES[name])
    case = Case(model=Regression, batch=rows, loss=loss, layout="1x2", shards="own")
    verdict = check(case, trainer_step_of(name), compare="update")
    assert verdict.outcome == outcome_of(like(name, loss="mean")) == "same"


class SquaresOfTokens(nn.Module):
    """A row has some tokens, which share its error."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(7, 1)

    def forward(self, rows: Tensor, labels: Tensor, tokens: Tensor) -> dict[str, Tensor]:
        return {"loss": ((self.layer(rows).squeeze(-1) - labels) ** 2 * tokens).sum()}


def rows_with_tokens(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "rows": torch.randn(EXAMPLES, 7, generator=generator),
        "labels": torch.randn(EXAMPLES, generator=generator),
        "tokens": TOKENS,
    }


TOKENS = torch.tensor([1.0, 9, 2, 5, 1, 3, 7, 2])


def token_mean(model: nn.Module, batch: dict[str, Tensor], factor: float = 1.0) -> Tensor:
    return loss(model, batch) * factor / TOKENS.sum()


def advised_factor(name: str) -> float:
    """What the advice multiplies the summed loss by, beside 1 / T."""
    mended = explain(like(name, loss="token-mean")).mended
    assert mended is not None
    return float(mended.setup.loss_factor)


@pytest.mark.parametrize(("off", "outcome"), [(1, "same"), (2, "different")])
@pytest.mark.parametrize("name", ["accelerate", "lightning"])
def test_the_advice_for_tokens_gives_the_big_batchs_update(
    name: str, off: int, outcome: str
) -> None:
    needs(*LIBRARIES[name])
    advised = partial(token_mean, factor=advised_factor(name) * off)
    case = Case(
        model=SquaresOfTokens,
        batch=rows_with_tokens,
        loss=token_mean,
        layout="1x2",
        shards="own",
    )
    verdict = check(case, trainer_step_of(name, advised), compare="update")
    assert verdict.outcome == outcome, str(verdict)


@pytest.mark.parametrize("examples", [7, 8, 15, 16, 17, 23, 40])
@pytest.mark.parametrize(("ranks", "batch"), [(1, 3), (2, 2), (3, 1), (4, 2)])
def test_accelerate_deals_the_batches_that_an_epoch_says(
    examples: int, ranks: int, batch: int
) -> None:
    needs("accelerate")
    from accelerate.data_loader import BatchSamplerShard

    batches = BatchSampler(SequentialSampler(range(examples)), batch, drop_last=False)
    epoch = setup_like("accelerate", batch=batch, ranks_per_node=ranks, examples=examples).epoch
    assert epoch is not None
    seen: list[int] = []
    for rank in range(ranks):
        dealt = list(BatchSamplerShard(batches, ranks, rank)) if ranks > 1 else list(batches)
        assert len(dealt) == epoch.micro_batches
        assert len(dealt[-1]) == epoch.last_batch
        seen += [one for part in dealt for one in part]
    assert len(seen) - examples == epoch.repeated


def test_nanogpt_divides_its_micro_batches_among_the_ranks() -> None:
    setup = setup_like("nanogpt", batch=12, ranks_per_node=8, accumulation=40)
    assert (setup.accumulation, setup.accumulation_divided) == (5, True)
    assert (setup.effective_batch, setup.optimizer) == (480, "adamw")
    assert explain(setup).factor == 1


def test_what_is_given_goes_before_what_a_trainer_sets() -> None:
    setup = like("hf-trainer", loss_times="3", optimizer="sgd")
    assert setup.optimizer == "sgd"
    assert explain(setup).factor == 3  # the Trainer multiplies by the world size itself
    assert explain(like("hf-trainer", loss_times="world-size")).factor == RANKS
    before = like("hf-trainer", tokens_over="micro-batch")
    assert (before.accumulation_divided, before.loss_times) == (True, "1")


@pytest.mark.parametrize("tokens_over", ["step", "micro-batch"])
def test_a_trainer_is_mended_by_its_own_settings(tokens_over: str) -> None:
    text = " ".join(str(explain(like("hf-trainer", tokens_over=tokens_over))).split())
    assert "To mend it, take transformers 4.54 or later, a model whose loss takes" in text
    assert "and average_tokens_across_devices=True" in text


@pytest.mark.parametrize(("name", "counts"), [("hf-trainer", 2), ("accelerate", 1)])
def test_a_sum_in_a_shorter_last_step_counts_by_the_trainers_divisor(
    name: str, counts: int
) -> None:
    setup = setup_like(name, loss="sum", batch=2, accumulation=2, examples=6)
    assert last_step_counts(explain(setup)) == {counts}


@pytest.mark.parametrize("name", DEFAULTS)
def test_one_rank_and_one_micro_batch_are_one_device(name: str) -> None:
    explanation = explain(setup_like(name, batch=4))
    assert explanation.factor == 1
    assert explanation.is_multiple
