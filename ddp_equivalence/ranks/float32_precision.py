"""In which precision a GPU multiplies float32: NVIDIA's TF32 keeps 10 bits of its mantissa."""

from __future__ import annotations

from operator import attrgetter

TF32_OVERRIDE = "NVIDIA_TF32_OVERRIDE"
"""With 0 in this variable, NVIDIA's libraries never use TF32, whatever torch allows."""


def torchs_precision() -> tuple[str, str]:
    """Torch's setting for products and for convolutions, such as ``tf32`` or ``ieee``."""
    import torch

    read = attrgetter("cuda.matmul.fp32_precision", "cudnn.conv.fp32_precision")
    products, convolutions = read(torch.backends)
    return products, convolutions
