"""Losses whose mean over ranks is not that of the big batch, under plain DDP."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.programs.common import (
    EXAMPLES,
    LENGTH,
    OUTPUTS,
    ROW,
    TOKENS,
    Batch,
    ByHand,
    LanguageModel,
    UnderDdp,
    classes,
    mean_squared_error,
    regression,
    texts,
    token_mean,
    token_sum,
)
from benchmarks.programs.program import Programs

programs = Programs("losses", right=False)


@programs.loss()
def squared_errors_summed(model: nn.Module, batch: Batch) -> Tensor:
    """The big batch's loss is a sum, and DDP divides the sum of the ranks by their number."""
    return F.mse_loss(model(batch["rows"]), batch["targets"], reduction="sum")


@programs.loss(batch=classes)
def cross_entropies_summed(model: nn.Module, batch: Batch) -> Tensor:
    """nn.CrossEntropyLoss sums over examples, and DDP averages over ranks."""
    return F.cross_entropy(model(batch["rows"]), batch["labels"], reduction="sum")


@programs.loss()
def mean_and_sum_together(model: nn.Module, batch: Batch) -> Tensor:
    """One task is a mean and the other a sum over examples; no one factor is right for both."""
    outputs, targets = model(batch["rows"]), batch["targets"]
    return F.mse_loss(outputs, targets) + 0.01 * F.l1_loss(outputs, targets, reduction="sum")


@programs.loss()
def small_sum_beside_a_mean(model: nn.Module, batch: Batch) -> Tensor:
    """A penalty on outputs is a sum over examples, with a weight of one millionth."""
    outputs = model(batch["rows"])
    return F.mse_loss(outputs, batch["targets"]) + 1e-6 * outputs.square().sum()


@programs.loss(model=LanguageModel, batch=texts)
def padded_token_mean(model: nn.Module, batch: Batch) -> Tensor:
    """Every rank takes the mean over its own tokens, and ranks have different numbers of them."""
    return token_mean(model, batch)


@programs.loss(model=LanguageModel, batch=texts, step=ByHand(token_mean))
def padded_token_mean_by_hand(model: nn.Module, batch: Batch) -> Tensor:
    """The ranks' means over their own tokens are averaged by hand."""
    return token_mean(model, batch)


def tokens_over_constant(model: nn.Module, batch: Batch) -> Tensor:
    """The sum over tokens, divided by all positions of the shard, padded ones too."""
    return token_sum(model, batch) / (len(batch["rows"]) * LENGTH)


@programs.loss(model=LanguageModel, batch=texts, step=UnderDdp(tokens_over_constant))
def padding_counted(model: nn.Module, batch: Batch) -> Tensor:
    """The step divides by all positions, the big batch by the tokens that are not padding."""
    return token_mean(model, batch)


def padding_learnt(model: nn.Module, batch: Batch) -> Tensor:
    """The mean over all positions; the target of padding is token 0."""
    return F.cross_entropy(
        model(batch["rows"]).flatten(0, 1), batch["targets"].clamp(min=0).flatten()
    )


@programs.loss(model=LanguageModel, batch=texts, step=UnderDdp(padding_learnt))
def padding_learnt_as_a_token(model: nn.Module, batch: Batch) -> Tensor:
    """The step forgets ignore_index, so that the model learns to predict padding."""
    return token_mean(model, batch)


@programs.loss(model=LanguageModel, batch=texts)
def perplexity(model: nn.Module, batch: Batch) -> Tensor:
    """The exponential of the mean; the mean of exponentials is another function."""
    return token_mean(model, batch).exp()


@programs.loss(model=LanguageModel, batch=texts)
def mean_of_text_means_and_tokens(model: nn.Module, batch: Batch) -> Tensor:
    """The sum over tokens is divided by the longest text of the rank."""
    longest = (batch["targets"] >= 0).sum(1).max()
    return token_sum(model, batch) / (len(batch["rows"]) * longest)


@programs.loss(batch=classes)
def class_weights(model: nn.Module, batch: Batch) -> Tensor:
    """nn.CrossEntropyLoss with weights divides by the weights of the rank's own labels."""
    weights = torch.tensor([0.2, 1.0, 3.0], dtype=batch["rows"].dtype)
    return F.cross_entropy(model(batch["rows"]), batch["labels"], weights)


@programs.loss(batch=classes)
def class_weights_in_nll(model: nn.Module, batch: Batch) -> Tensor:
    """nn.NLLLoss with weights divides by the weights of the rank's own labels."""
    weights = torch.tensor([1.0, 1.1, 0.9], dtype=batch["rows"].dtype)
    return F.nll_loss(model(batch["rows"]).log_softmax(1), batch["labels"], weights)


@programs.loss(batch=classes)
def weights_from_the_labels_at_hand(model: nn.Module, batch: Batch) -> Tensor:
    """Class weights are computed from the frequencies in the rank's own shard."""
    count = torch.bincount(batch["labels"], minlength=OUTPUTS).to(batch["rows"].dtype)
    each = F.cross_entropy(model(batch["rows"]), batch["labels"], reduction="none")
    return (each / count[batch["labels"]]).mean()


@programs.loss(batch=classes)
def ignored_class(model: nn.Module, batch: Batch) -> Tensor:
    """nn.CrossEntropyLoss ignores class 0, so that ranks divide by different counts."""
    return F.cross_entropy(model(batch["rows"]), batch["labels"], ignore_index=0)


@programs.loss()
def positives_only(model: nn.Module, batch: Batch) -> Tensor:
    """The mean over outputs whose target is positive, of which ranks have different numbers."""
    positive = batch["targets"] > 0.3
    return F.mse_loss(model(batch["rows"])[positive], batch["targets"][positive])


@programs.loss(seed=3)
def detection_style(model: nn.Module, batch: Batch) -> Tensor:
    """All errors are divided by the positives of the rank, as detectors do."""
    positives = (batch["targets"][:, 0] > 0.5).sum().clamp(min=1)
    return F.smooth_l1_loss(model(batch["rows"]), batch["targets"], reduction="sum") / positives


def weighted_rows(generator: torch.Generator) -> Batch:
    """Rows, targets, and a weight for each example."""
    return regression(generator) | {"weight": torch.rand(EXAMPLES, generator=generator)}


@programs.loss(batch=weighted_rows)
def example_weights_normalised(model: nn.Module, batch: Batch) -> Tensor:
    """The weights of examples are divided by their sum on the rank."""
    each = F.mse_loss(model(batch["rows"]), batch["targets"], reduction="none").mean(1)
    return (batch["weight"] * each).sum() / batch["weight"].sum()


@programs.loss()
def root_mean_square(model: nn.Module, batch: Batch) -> Tensor:
    """The root of a mean is not the mean of the roots."""
    return mean_squared_error(model, batch).sqrt()


@programs.loss()
def logarithm_of_the_error(model: nn.Module, batch: Batch) -> Tensor:
    """The logarithm of a mean is not the mean of the logarithms."""
    return mean_squared_error(model, batch).log()


@programs.loss()
def signal_to_noise_ratio(model: nn.Module, batch: Batch) -> Tensor:
    """Error over power, each summed over the rank's examples (in decibel)."""
    error = (model(batch["rows"]) - batch["targets"]).square().sum()
    return 10 * torch.log10(error / batch["targets"].square().sum())


@programs.loss()
def explained_variance(model: nn.Module, batch: Batch) -> Tensor:
    """The error is divided by the variance of the rank's own targets."""
    return mean_squared_error(model, batch) / batch["targets"].var()


@programs.loss()
def soft_dice(model: nn.Module, batch: Batch) -> Tensor:
    """The Dice overlap is taken over all pixels of the rank, and not of the big batch."""
    shown, wanted = model(batch["rows"]).sigmoid(), (batch["targets"] > 0).to(torch.float64)
    return 1 - 2 * (shown * wanted).sum() / (shown.sum() + wanted.sum())


@programs.loss()
def largest_error(model: nn.Module, batch: Batch) -> Tensor:
    """Only the worst example of a rank counts."""
    return (model(batch["rows"]) - batch["targets"]).square().sum(1).max()


@programs.loss()
def hard_examples(model: nn.Module, batch: Batch) -> Tensor:
    """The worst quarter of the rank's examples counts, and not of the big batch's."""
    each = (model(batch["rows"]) - batch["targets"]).square().mean(1)
    return each.topk(len(each) // 4).values.mean()


@programs.loss()
def median_error(model: nn.Module, batch: Batch) -> Tensor:
    """Only the example in the middle of the rank's errors counts."""
    return (model(batch["rows"]) - batch["targets"]).square().mean(1).median()


@programs.loss()
def softened_maximum(model: nn.Module, batch: Batch) -> Tensor:
    """Logsumexp over the rank's errors weighs them against each other."""
    return (model(batch["rows"]) - batch["targets"]).square().mean(1).logsumexp(0)


@programs.loss()
def tasks_balanced_by_size(model: nn.Module, batch: Batch) -> Tensor:
    """Each task is divided by its own detached value on the rank."""
    errors = (model(batch["rows"]) - batch["targets"]).square().mean(0)
    return (errors / errors.detach()).sum()


@programs.loss()
def curriculum(model: nn.Module, batch: Batch) -> Tensor:
    """Examples whose error is below the rank's own mean count alone."""
    each = (model(batch["rows"]) - batch["targets"]).square().mean(1)
    return (each * (each < each.mean())).mean()


def scaled_by_the_rows(model: nn.Module, batch: Batch) -> Tensor:
    """The mean, multiplied by the number of rows at hand."""
    return mean_squared_error(model, batch) * len(batch["rows"])


@programs.loss(step=UnderDdp(scaled_by_the_rows))
def multiplied_by_the_local_batch(model: nn.Module, batch: Batch) -> Tensor:
    """The step multiplies by the rows of the rank; the loss of the big batch is a plain mean."""
    return mean_squared_error(model, batch)


def in_other_units(model: nn.Module, batch: Batch) -> Tensor:
    """The mean, divided by the logarithm of 2."""
    return mean_squared_error(model, batch) / math.log(2)


@programs.loss(step=UnderDdp(in_other_units))
def measured_in_bits(model: nn.Module, batch: Batch) -> Tensor:
    """The step's loss is in bits and that of the big batch is not."""
    return mean_squared_error(model, batch)


@programs.loss(model=lambda: nn.Linear(ROW, TOKENS), batch=classes)
def entropy_of_the_mean(model: nn.Module, batch: Batch) -> Tensor:
    """The entropy of the mean prediction, which each rank takes over its own examples."""
    mean = model(batch["rows"]).softmax(1).mean(0)
    return F.cross_entropy(model(batch["rows"]), batch["labels"]) + (mean * mean.log()).sum()
