"""Layers of torch.nn that treat every example by itself: under DDP they are the big batch."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.programs.common import (
    HIDDEN,
    OUTPUTS,
    ROW,
    TOKENS,
    ByHand,
    images,
    mean_squared_error,
    words,
)
from benchmarks.programs.program import Programs

programs = Programs("layers", right=True)


def with_head(*layers: nn.Module, features: int) -> nn.Module:
    """These layers on images, and a linear layer on all numbers that come out."""
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(features, OUTPUTS))


@programs.model()
def one_linear_layer_without_bias() -> nn.Module:
    """The model is one matrix."""
    return nn.Linear(ROW, OUTPUTS, bias=False)


@programs.model()
class Bilinear(nn.Module):
    """nn.Bilinear multiplies every row with itself."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = nn.Bilinear(ROW, ROW, OUTPUTS)

    def forward(self, rows: Tensor) -> Tensor:
        return self.pair(rows, rows)


@programs.model(batch=images)
def convolution_2d() -> nn.Module:
    """nn.Conv2d with stride and padding."""
    return with_head(nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.Tanh(), features=36)


@programs.model(batch=images)
def grouped_and_dilated_convolution() -> nn.Module:
    """nn.Conv2d with groups, a dilation and circular padding."""
    layer = nn.Conv2d(2, 4, 3, groups=2, dilation=2, padding=2, padding_mode="circular")
    return with_head(layer, nn.ReLU(), features=144)


@programs.model(batch=images)
def depthwise_separable_convolution() -> nn.Module:
    """A convolution for each channel, and then one that mixes the channels."""
    return with_head(
        nn.Conv2d(2, 2, 3, padding=1, groups=2), nn.Conv2d(2, 3, 1), nn.SiLU(), features=108
    )


@programs.model()
def convolution_1d() -> nn.Module:
    """nn.Conv1d along the numbers of a row."""
    return nn.Sequential(nn.Unflatten(1, (1, ROW)), with_head(nn.Conv1d(1, 2, 3), features=6))


@programs.model(batch=images)
def convolution_3d() -> nn.Module:
    """nn.Conv3d, with the two channels as depth."""
    return nn.Sequential(nn.Unflatten(1, (1, 2)), with_head(nn.Conv3d(1, 2, 2), features=50))


@programs.model(batch=images)
def transposed_convolution() -> nn.Module:
    """nn.ConvTranspose2d, then an average over windows."""
    return with_head(nn.ConvTranspose2d(2, 3, 2, stride=2), nn.AvgPool2d(3), features=48)


@programs.model(batch=images)
def lp_and_max_pooling() -> nn.Module:
    """Pooling by norm and by maximum."""
    return with_head(nn.Conv2d(2, 3, 3), nn.LPPool2d(2.0, 2), nn.MaxPool2d(2), features=3)


@programs.model(batch=images)
def adaptive_pooling_and_upsampling() -> nn.Module:
    """Adaptive pooling, then a bilinear nn.Upsample."""
    layers = (nn.Conv2d(2, 3, 3), nn.AdaptiveAvgPool2d(2), nn.Upsample(size=3, mode="bilinear"))
    return with_head(*layers, features=27)


@programs.model(batch=images)
def pixel_shuffle() -> nn.Module:
    """nn.PixelUnshuffle, a convolution, and nn.PixelShuffle."""
    layers = (nn.PixelUnshuffle(2), nn.Conv2d(8, 8, 3, padding=1), nn.PixelShuffle(2))
    return with_head(*layers, features=72)


@programs.model(batch=images)
class UnfoldAndFold(nn.Module):
    """Every patch of an image goes through one linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.last = nn.Linear(8, 8), nn.Linear(72, OUTPUTS)

    def forward(self, rows: Tensor) -> Tensor:
        patches = F.unfold(rows, 2, stride=2).transpose(1, 2)
        back = F.fold(torch.tanh(self.patch(patches)).transpose(1, 2), 6, 2, stride=2)
        return self.last(back.flatten(1))


@programs.model()
class FourierMixing(nn.Module):
    """The real part of a Fourier transform along the row, between two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(ROW, HIDDEN), nn.Linear(HIDDEN, OUTPUTS)

    def forward(self, rows: Tensor) -> Tensor:
        return self.last(torch.tanh(torch.fft.fft(self.first(rows)).real))


@programs.model(batch=images)
def group_norm() -> nn.Module:
    """nn.GroupNorm normalises each image by itself."""
    return with_head(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.Tanh(), features=64)


@programs.model(batch=images, step=ByHand(mean_squared_error))
def instance_norm() -> nn.Module:
    """nn.InstanceNorm2d normalises each channel of each image by itself."""
    return with_head(nn.Conv2d(2, 4, 3), nn.InstanceNorm2d(4, affine=True), features=64)


@programs.model(batch=images)
def local_response_norm() -> nn.Module:
    """nn.LocalResponseNorm divides by what neighbouring channels hold."""
    return with_head(nn.Conv2d(2, 4, 3), nn.LocalResponseNorm(2), features=64)


@programs.model()
def layer_norm_and_rms_norm() -> nn.Module:
    """nn.LayerNorm before, and nn.RMSNorm after a linear layer."""
    return nn.Sequential(nn.LayerNorm(ROW), nn.Linear(ROW, OUTPUTS), nn.RMSNorm(OUTPUTS))


@programs.model()
def batch_norm_with_stored_statistics() -> nn.Module:
    """A pretrained nn.BatchNorm1d in eval mode uses the statistics that it has stored."""
    norm = nn.BatchNorm1d(HIDDEN)
    nn.init.uniform_(norm.running_var, 0.5, 2.0)
    return nn.Sequential(nn.Linear(ROW, HIDDEN), norm.eval(), nn.Linear(HIDDEN, OUTPUTS))


@programs.model()
def parametric_activations() -> nn.Module:
    """nn.PReLU learns its slopes."""
    return nn.Sequential(
        nn.Linear(ROW, HIDDEN), nn.PReLU(HIDDEN), nn.Linear(HIDDEN, OUTPUTS), nn.PReLU()
    )


@programs.model()
class GatedLinearUnit(nn.Module):
    """Half of a layer's outputs gate the other half."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.last = nn.Linear(ROW, 2 * HIDDEN), nn.Linear(HIDDEN, OUTPUTS)

    def forward(self, rows: Tensor) -> Tensor:
        return self.last(F.glu(self.both(rows)))


@programs.model()
def dropout_with_probability_zero() -> nn.Module:
    """nn.Dropout(0.0) drops nothing, so that the ranks' random numbers do not matter."""
    return nn.Sequential(nn.Linear(ROW, HIDDEN), nn.Dropout(0.0), nn.Linear(HIDDEN, OUTPUTS))


@programs.model(batch=words)
class Embeddings(nn.Module):
    """nn.Embedding with a padding index, averaged over the text."""

    sparse = False

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(TOKENS, HIDDEN, padding_idx=0, sparse=self.sparse)
        self.last = nn.Linear(HIDDEN, OUTPUTS)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.last(self.table(tokens).mean(1))


@programs.model(batch=words)
class SparseEmbeddings(Embeddings):
    """nn.Embedding with sparse gradients, which DDP reduces as index and value."""

    sparse = True


@programs.model(batch=words)
class EmbeddingBags(nn.Module):
    """nn.EmbeddingBag sums the vectors of a text."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.last = nn.EmbeddingBag(TOKENS, HIDDEN, mode="sum"), nn.Linear(HIDDEN, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.last(self.bag(tokens))


@programs.model(batch=words)
class EmbeddingsOfLimitedLength(Embeddings):
    """With ``max_norm`` the rows are shortened in place before they are used, on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(TOKENS, HIDDEN, max_norm=1.0)


@programs.model()
class CosineHead(nn.Module):
    """The outputs are cosines between a hidden vector and learnt directions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.directions = nn.Linear(ROW, HIDDEN), nn.Parameter(torch.randn(3, HIDDEN))

    def forward(self, rows: Tensor) -> Tensor:
        return F.normalize(self.first(rows), dim=1) @ F.normalize(self.directions, dim=1).T
