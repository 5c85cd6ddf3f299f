"""Records which lines make samplers and loaders, and register hooks of tensors and modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import CodeType, FrameType
from typing import Any

from torch import Tensor, nn

from ddp_equivalence.measurement.calls import Kind
from ddp_equivalence.measurement.code_lines import beginning_of, is_users, lines_of
from ddp_equivalence.measurement.data_functions import (
    DATA_FUNCTIONS,
    Described,
    own_length,
    own_sampler,
)
from ddp_equivalence.measurement.line_tracer import Handler

REGISTERING_HOOKS: tuple[Any, ...] = (
    Tensor.register_hook,
    Tensor.register_post_accumulate_grad_hook,
    nn.Module.register_full_backward_hook,
    nn.Module.register_forward_hook,
)


class RegisteringCalls:
    """``append(kind, lines, ...)`` adds a call. ``names``: id of a parameter -> its name."""

    def __init__(self, append: Callable[..., None], names: Mapping[int, str]) -> None:
        self._append = append
        self._names = names

    def handlers(self) -> dict[CodeType, Handler]:
        """The functions of torch that are recorded when they are called."""
        functions: dict[CodeType, Handler] = {
            code: partial(self._on_data, describe) for code, describe in DATA_FUNCTIONS.items()
        }
        for registering in REGISTERING_HOOKS:
            functions[registering.__code__] = self._on_hook
        return functions

    def _on_data(self, describe: Callable[[FrameType], Described], frame: FrameType) -> None:
        lines = lines_of(frame)
        if lines[0] is not None:
            kind, what, value = describe(frame)
            made_at, length = own_sampler(frame), own_length(frame)
            self._append(kind, lines, what=what, value=value, made_at=made_at, chosen_at=length)

    def _on_hook(self, frame: FrameType) -> None:
        owner = frame.f_locals["self"]
        name = self._names.get(id(owner))
        lines = lines_of(frame)
        known = name is not None or isinstance(owner, nn.Module) or _is_of_user(frame)
        if _is_called_again(frame):
            return
        if known and lines[0] is not None:  # the suite registers hooks of its own
            self._append(
                Kind.TENSOR_HOOK,
                lines,
                what=frame.f_code.co_name,
                names=(name,) if name is not None else (),
                made_at=beginning_of(frame.f_locals.get("hook")),
            )


def _is_of_user(frame: FrameType) -> bool:
    return frame.f_back is not None and is_users(frame.f_back.f_code.co_filename)


def _is_called_again(frame: FrameType) -> bool:
    """True where a mode of the suite has called the function a second time."""
    return frame.f_back is not None and frame.f_back.f_code.co_name == "__torch_function__"
