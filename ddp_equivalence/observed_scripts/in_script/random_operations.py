"""The operations of torch that draw random numbers, and how each of them draws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

aten: Any = torch.ops.aten

IN_PLACE = {
    *(aten.bernoulli_.float, aten.bernoulli_.Tensor, aten.uniform_.default, aten.normal_.default),
    *(aten.random_.default, getattr(aten.random_, "from"), aten.random_.to),
    *(aten.exponential_.default, aten.log_normal_.default, aten.geometric_.default),
}
"""Operations that fill their first argument."""

MADE = {
    *(aten.rand.default, aten.randn.default, aten.normal.float_float),
    *(aten.randint.default, aten.randint.low),
}
"""Operations that make a tensor of a given size, which is the last of their arguments."""

LIKE = {
    *(aten.rand_like.default, aten.randn_like.default),
    *(aten.randint_like.default, aten.randint_like.low_dtype),
    *(aten.native_dropout.default, aten._fused_dropout.default),
    *(aten.bernoulli.default, aten.bernoulli.p, aten.bernoulli.Tensor, aten.multinomial.default),
    *(aten.normal.Tensor_float, aten.normal.float_Tensor, aten.normal.Tensor_Tensor),
}
"""Operations that make tensors with the rows of their first tensor. How many numbers they draw
depends on its shape alone. A dropout on a GPU is one of them; on the CPU it is made of others.
"""

LIKE_VALUES = {aten.poisson.default, aten._standard_gamma.default}
"""The same, but how many numbers they draw depends on the values too."""

OF_DIM_0 = {aten.multinomial.default}
"""The rows of these are in dim 0 at any rate."""

DRAW_NOTHING = {aten.empty_like.default, aten.native_dropout_backward.default}


def drops_something(func: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> bool:
    """False if an operation that may drop something, such as an attention, drops nothing."""
    given = {one.name: one.default_value for one in func._schema.arguments}
    given |= dict(zip(given, args, strict=False)) | dict(named)
    of_dropout = "p" if "dropout" in str(func) else ""
    probability = next((given[n] for n in ("dropout_p", "dropout", of_dropout) if n in given), 1.0)
    return float(probability or 0.0) > 0.0 and given.get("train") is not False


def device_of(args: Sequence[Any], named: Mapping[str, Any]) -> torch.device:
    """Where an operation draws."""
    if named.get("device") is not None:
        return torch.device(named["device"])
    tensor = first_tensor(args)
    return torch.device("cpu") if tensor is None else tensor.device


def first_tensor(args: Sequence[Any]) -> Any:
    """The first tensor among the arguments; None if there is none."""
    return next((one for one in pytree.tree_leaves(args) if isinstance(one, Tensor)), None)
