"""Losses of torch that are a mean over equally many numbers on every rank."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.programs.common import (
    EXAMPLES,
    OUTPUTS,
    ROW,
    Batch,
    ByHand,
    classes,
    regression,
    sequences,
)
from benchmarks.programs.program import Programs

programs = Programs("losses", right=True)


@programs.loss()
def absolute_error(model: nn.Module, batch: Batch) -> Tensor:
    """nn.L1Loss over all outputs."""
    return F.l1_loss(model(batch["rows"]), batch["targets"])


@programs.loss()
def smooth_absolute_error(model: nn.Module, batch: Batch) -> Tensor:
    """nn.SmoothL1Loss with a beta of a half."""
    return F.smooth_l1_loss(model(batch["rows"]), batch["targets"], beta=0.5)


@programs.loss()
def huber(model: nn.Module, batch: Batch) -> Tensor:
    """nn.HuberLoss, of which some examples are in the linear part."""
    return F.huber_loss(model(batch["rows"]), batch["targets"], delta=0.7)


@programs.loss()
def log_hyperbolic_cosine(model: nn.Module, batch: Batch) -> Tensor:
    """A smooth loss of one's own."""
    return (model(batch["rows"]) - batch["targets"]).cosh().log().mean()


@programs.loss()
def quantiles(model: nn.Module, batch: Batch) -> Tensor:
    """Every output is another quantile of the target (the pinball loss)."""
    difference = batch["targets"] - model(batch["rows"])
    levels = torch.tensor([0.1, 0.5, 0.9], dtype=difference.dtype)
    return torch.maximum(levels * difference, (levels - 1) * difference).mean()


@programs.loss(batch=classes)
def plain_cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    """nn.CrossEntropyLoss over classes that are not equally frequent."""
    return F.cross_entropy(model(batch["rows"]), batch["labels"])


@programs.loss(batch=classes)
def label_smoothing(model: nn.Module, batch: Batch) -> Tensor:
    """nn.CrossEntropyLoss with label smoothing."""
    return F.cross_entropy(model(batch["rows"]), batch["labels"], label_smoothing=0.1)


@programs.loss()
def soft_labels(model: nn.Module, batch: Batch) -> Tensor:
    """The target is a probability for each class."""
    return F.cross_entropy(model(batch["rows"]), batch["targets"].softmax(1))


@programs.loss(batch=classes)
def class_weights_over_the_batch(model: nn.Module, batch: Batch) -> Tensor:
    """Weighted classes divided by the number of examples, and not by the weights that occur."""
    weights = torch.tensor([0.2, 1.0, 3.0], dtype=batch["rows"].dtype)
    each = F.cross_entropy(model(batch["rows"]), batch["labels"], weights, reduction="none")
    return each.mean()


@programs.loss(batch=classes)
def negative_log_likelihood(model: nn.Module, batch: Batch) -> Tensor:
    """nn.NLLLoss over log_softmax."""
    return F.nll_loss(model(batch["rows"]).log_softmax(1), batch["labels"])


@programs.loss(batch=classes)
def focal(model: nn.Module, batch: Batch) -> Tensor:
    """Examples that are already right count less; the divisor is the number of examples."""
    each = F.cross_entropy(model(batch["rows"]), batch["labels"], reduction="none")
    return ((1 - torch.exp(-each)) ** 2 * each).mean()


@programs.loss()
def binary_cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    """nn.BCELoss behind a sigmoid."""
    return F.binary_cross_entropy(model(batch["rows"]).sigmoid(), (batch["targets"] > 0).to(float))


@programs.loss()
def positive_weights(model: nn.Module, batch: Batch) -> Tensor:
    """nn.BCEWithLogitsLoss with pos_weight, which divides by the number of outputs all the same."""
    wanted, weight = (batch["targets"] > 0.5).double(), torch.tensor([2.0, 5.0, 1.0]).double()
    scores = model(batch["rows"])
    return F.binary_cross_entropy_with_logits(scores, wanted, pos_weight=weight)


@programs.loss()
def multi_label_margin(model: nn.Module, batch: Batch) -> Tensor:
    """nn.MultiLabelSoftMarginLoss over outputs that are each right or wrong."""
    wanted = (batch["targets"] > 0).to(batch["targets"].dtype)
    return F.multilabel_soft_margin_loss(model(batch["rows"]), wanted)


@programs.loss(batch=classes)
def multi_class_margin(model: nn.Module, batch: Batch) -> Tensor:
    """nn.MultiMarginLoss with squared margins."""
    return F.multi_margin_loss(model(batch["rows"]), batch["labels"], p=2)


@programs.loss()
def soft_margin(model: nn.Module, batch: Batch) -> Tensor:
    """nn.SoftMarginLoss on signs."""
    return F.soft_margin_loss(model(batch["rows"]), batch["targets"].sign())


@programs.loss()
def hinge_embedding(model: nn.Module, batch: Batch) -> Tensor:
    """nn.HingeEmbeddingLoss on distances."""
    return F.hinge_embedding_loss(model(batch["rows"]).abs(), batch["targets"].sign())


@programs.loss()
def divergence_of_a_teacher(model: nn.Module, batch: Batch) -> Tensor:
    """nn.KLDivLoss with batchmean: the sum over classes, divided by the examples."""
    student, teacher = model(batch["rows"]).log_softmax(1), batch["targets"].softmax(1)
    return F.kl_div(student, teacher, reduction="batchmean")


@programs.loss()
def poisson(model: nn.Module, batch: Batch) -> Tensor:
    """nn.PoissonNLLLoss of counts."""
    return F.poisson_nll_loss(model(batch["rows"]), batch["targets"].abs().round())


@programs.loss(model=lambda: nn.Linear(ROW, 2 * OUTPUTS))
def gaussian(model: nn.Module, batch: Batch) -> Tensor:
    """nn.GaussianNLLLoss: the model gives mean and variance."""
    mean, spread = model(batch["rows"]).chunk(2, dim=1)
    return F.gaussian_nll_loss(mean, batch["targets"], F.softplus(spread) + 0.1, full=True)


class Frames(nn.Module):
    """Scores of four symbols for each position of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(ROW, 4)

    def forward(self, rows: Tensor) -> Tensor:
        return self.scores(rows)


@programs.loss(model=Frames, batch=sequences)
def connectionist_classification(model: nn.Module, batch: Batch) -> Tensor:
    """nn.CTCLoss, which divides by each text's own length and then by the examples."""
    scores = model(batch["rows"]).log_softmax(2).transpose(0, 1)
    examples = scores.shape[1]
    wanted = 1 + (batch["targets"] > 0).long()
    lengths = 1 + (batch["targets"][:, 0] > 0).long()
    inputs = torch.full((examples,), scores.shape[0])
    return F.ctc_loss(scores, wanted, inputs, lengths)


@programs.loss()
def weighted_tasks(model: nn.Module, batch: Batch) -> Tensor:
    """The sum of three losses with fixed weights, each of them a mean."""
    outputs, targets = model(batch["rows"]), batch["targets"]
    first = F.mse_loss(outputs[:, 0], targets[:, 0])
    second = F.l1_loss(outputs[:, 1], targets[:, 1])
    third = F.binary_cross_entropy_with_logits(outputs[:, 2], (targets[:, 2] > 0).to(outputs.dtype))
    return first + 0.3 * second + 0.05 * third


class Uncertain(nn.Module):
    """Three outputs, and for each of them a learnt logarithm of its variance."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.log_variance = nn.Linear(ROW, OUTPUTS), nn.Parameter(torch.zeros(OUTPUTS))

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(rows), self.log_variance


@programs.loss(model=Uncertain)
def learnt_weights_of_tasks(model: nn.Module, batch: Batch) -> Tensor:
    """The tasks weigh each other by variances that the model learns and returns."""
    outputs, log_variance = model(batch["rows"])
    errors = (outputs - batch["targets"]).square().mean(0)
    return (errors * torch.exp(-log_variance) + log_variance).sum()


def weighted_rows(generator: torch.Generator) -> Batch:
    """Rows, targets, and for each example a weight and whether its target is known."""
    return regression(generator) | {
        "weight": torch.rand(EXAMPLES, generator=generator),
        "known": torch.rand(EXAMPLES, generator=generator) > 0.5,
    }


@programs.loss(batch=weighted_rows)
def example_weights_over_the_batch(model: nn.Module, batch: Batch) -> Tensor:
    """Every example has a weight; the divisor is the number of examples."""
    each = F.mse_loss(model(batch["rows"]), batch["targets"], reduction="none").mean(1)
    return (batch["weight"] * each).mean()


@programs.loss(batch=weighted_rows)
def unknown_targets_count_as_zero(model: nn.Module, batch: Batch) -> Tensor:
    """Examples without a target add nothing, but they count in the divisor."""
    each = F.mse_loss(model(batch["rows"]), batch["targets"], reduction="none").sum(1)
    return torch.where(batch["known"], each, 0.0).sum() / len(each)


@programs.loss()
def sum_divided_by_a_constant(model: nn.Module, batch: Batch) -> Tensor:
    """Every example's loss is its mean over outputs; the mean over examples is taken by hand."""
    total = (model(batch["rows"]) - batch["targets"]).square().sum()
    return total / (len(batch["rows"]) * OUTPUTS)


@programs.loss(batch=classes, step=ByHand(plain_cross_entropy))
def stable_cross_entropy_by_hand(model: nn.Module, batch: Batch) -> Tensor:
    """Logsumexp minus the score of the class; the step uses torch's own cross entropy instead."""
    scores = model(batch["rows"])
    chosen = scores.gather(1, batch["labels"][:, None]).squeeze(1)
    return (scores.logsumexp(1) - chosen).mean()
