"""The loss and gradient of some examples alone; every prediction is made of these."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ddp_equivalence.case.build import build_model
from ddp_equivalence.case.case import Case
from ddp_equivalence.case.training import Training
from ddp_equivalence.measurement.random_draws import Draw, DrawReplay
from ddp_equivalence.reference import in_dtype, loss_of_the_case, train

OTHER_SEED = 7_919
"""Added to a seed, it gives the seed of other random numbers."""


@dataclass
class Drawn:
    """``anything``: a forward pass drew numbers from a generator of torch, numpy or random."""

    anything: bool = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Notice inside the block whether the states of the generators change."""
        torch_state, numpy_state = torch.get_rng_state(), _numpy_position()
        python_state = random.getstate()
        yield
        self.anything |= (
            numpy_state != _numpy_position()
            or python_state != random.getstate()
            or not torch.equal(torch_state, torch.get_rng_state())
        )


def _numpy_position() -> tuple[bytes, Any]:
    state: Any = np.random.get_state()
    return np.asarray(state[1]).tobytes(), state[2:]


def loss_and_gradient_of(
    case: Case,
    batch: Any,
    earlier_batches: Sequence[Any] = (),
    training: Training | None = None,
    generator: bytes = b"",
    other_numbers: bool = False,
    drawn: Drawn | None = None,
    buffers: Mapping[str, Tensor] | None = None,
    draws: Sequence[Draw] | None = None,
    computed_in: torch.dtype | None = torch.float64,
) -> tuple[float, dict[str, Tensor | None]]:
    """The loss of ``batch`` alone and its gradient by parameter name, as float64 numbers.

    The weights are those that ``training`` on the ``earlier_batches`` leaves. ``generator`` is the
    state that torch's generator gets before each forward pass; empty means the usual state.
    ``other_numbers``: let all generators draw others than usual. ``drawn`` is told whether anything
    was drawn. ``buffers``: what the model's buffers hold before the last forward pass, if it is not
    what the earlier ones have left. ``draws``: the random numbers that everything draws; NaN is
    returned if it draws others. ``computed_in``: the dtype of model and batch; None for the case's.
    Raises BadCase as the reference does, for instance if the loss needs more examples.
    """
    loss = loss_of_the_case(case)
    left = len(earlier_batches)

    def with_generators(model: nn.Module, batch: Any) -> Any:
        nonlocal left
        if buffers and not left:
            _fill_buffers(model, buffers)
        left -= 1
        if generator:
            torch.set_rng_state(torch.frombuffer(bytearray(generator), dtype=torch.uint8))
        if other_numbers:
            seed = torch.initial_seed() + OTHER_SEED
            torch.default_generator.manual_seed(seed)
            np.random.seed(seed % 2**32)
            random.seed(seed)
        with (drawn or Drawn()).watching():
            return loss(model, batch)

    batches = [in_dtype(one, computed_in) for one in (*earlier_batches, batch)]
    model, replay = build_model(case).to(computed_in), DrawReplay(draws or ())
    with nullcontext() if draws is None else replay.watching():
        gradients, losses = train(
            case, model, batches, "gradients", training or Training(), with_generators
        )
    last = len(batches) - 1
    if draws is not None and not replay.complete:
        return float("nan"), {
            name: torch.full_like(one, torch.nan) for name, one in model.named_parameters()
        }
    return losses[-1], {
        name: None if gradient is None else gradient.double()
        for (step, name), gradient in gradients.items()
        if step == last
    }


def _fill_buffers(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Let the buffers of the model hold these values. Those of another shape are left alone."""
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name in values and values[name].shape == buffer.shape:
                buffer.copy_(values[name])


def gradient_of_outputs(
    case: Case, batch: Any, computed_in: torch.dtype | None
) -> tuple[Tensor, Tensor] | None:
    """What the model returns for ``batch``, and the gradient of the loss with respect to it.

    ``computed_in``: as above. None unless the loss calls the model once, and the model returns one
    tensor. Raises BadCase as the reference does.
    """
    outputs: list[Any] = []
    model = build_model(case).to(computed_in)

    def keep(module: nn.Module, arguments: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.requires_grad:
            output.retain_grad()
        outputs.append(output)

    handle = model.register_forward_hook(keep)
    try:
        train(case, model, [in_dtype(batch, computed_in)], "gradients", Training())
    finally:
        handle.remove()
    if len(outputs) != 1 or not isinstance(outputs[0], Tensor) or outputs[0].grad is None:
        return None
    return outputs[0].detach().double(), outputs[0].grad.double()
