"""The modules and functions of torch that draw random numbers or couple the examples of a batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import CodeType, FrameType

from torch import nn
from torch.nn import functional as F

from ddp_equivalence.measurement.code_lines import is_users


def _trains(frame: FrameType) -> bool:
    return bool(frame.f_locals["self"].training)


def _drops(frame: FrameType) -> bool:
    module = frame.f_locals["self"]
    return bool(module.training and getattr(module, "p", getattr(module, "dropout", 0)) > 0)


def _called_by_user(frame: FrameType) -> bool:
    caller = frame.f_back
    is_called = caller is not None and is_users(caller.f_code.co_filename)
    return is_called and bool(frame.f_locals.get("training", True))


_NORMS = (nn.modules.batchnorm._BatchNorm, nn.SyncBatchNorm)
_DROPOUTS = (
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout),
    *(nn.FeatureAlphaDropout, nn.MultiheadAttention, nn.RNN, nn.LSTM, nn.GRU),
)
_FUNCTIONS = (
    *(F.batch_norm, F.dropout, F.dropout1d, F.dropout2d, F.dropout3d),
    *(F.alpha_dropout, F.feature_alpha_dropout),
)


def _code(function: Callable[..., object]) -> CodeType:
    code: CodeType = inspect.unwrap(function).__code__
    return code


RANDOM_AND_COUPLING: dict[CodeType, Callable[[FrameType], bool]] = {
    **{_code(function): _called_by_user for function in _FUNCTIONS},
    **{_code(kind.forward): _trains for kind in _NORMS},
    **{_code(kind.forward): _drops for kind in _DROPOUTS},
}
"""The code of each -> whether a call, given by its frame, does so."""
