"""What an offloaded model refuses, since it would go wrong without a sign: saving, training, conversion, copies of it.

Its experts are not in its parameters, which are empty meanwhile. A checkpoint of them would lack the experts, a
gradient would be taken through slots that hold other experts by then, and a conversion would leave the experts behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from trace_capture.errors import ModelError
from trace_capture.hooks import MoeSite


class _NoBackward(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, output: Tensor) -> Tensor:
        return output.view_as(output)

    @staticmethod
    def backward(_: Any, *gradients: Any) -> NoReturn:
        raise ModelError(
            "an offloaded model cannot be trained: its slots hold other experts by now; call unload(model)"
        )


def without_backward(output: Tensor) -> Tensor:
    """The same numbers; where they take part in a graph, going back through them raises `ModelError`."""
    return _NoBackward.apply(output) if output.requires_grad else output  # type: ignore[no-untyped-call]


def refuse_state(sites: Sequence[MoeSite]) -> list[RemovableHandle]:
    """Make `state_dict`, `save_pretrained` and `load_state_dict` of a model with these sites, or of any part of it that
    has one, raise `ModelError` until the handles are removed."""

    def refuse(*_: Any) -> NoReturn:
        raise ModelError(
            "the experts of an offloaded model are not in its parameters, so it can neither be saved nor loaded into; "
            "call unload(model) first"
        )

    handles = []
    for site in sites:
        handles.append(site.experts.register_state_dict_pre_hook(refuse))  # type: ignore[no-untyped-call]
        handles.append(site.experts.register_load_state_dict_pre_hook(refuse))  # type: ignore[no-untyped-call]
    return handles


class Unconverted:
    """Notices that a model was converted or moved after its experts were taken out.

    Args:
        model: as it is when it is offloaded.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._was = self._now()

    def check(self) -> None:
        """Called before every forward pass.

        Raises:
            ModelError: the model's numbers have another type or place than its experts.
        """
        if (now := self._now()) != self._was:
            before, after = (" on ".join(map(str, state)) for state in (self._was, now))
            raise ModelError(
                f"the model was offloaded as {before} and is {after} now, while its experts stayed as they were; call "
                "unload(model), convert it, and offload it again"
            )

    def _now(self) -> tuple[torch.dtype, torch.device]:
        parameter = next(self._model.parameters())
        return parameter.dtype, parameter.device


def refuse_copy() -> NoReturn:
    """Of experts that no engine knows.

    Raises:
        ModelError: always.
    """
    raise ModelError(
        "these experts belong to a copy of an offloaded model, and a copy has none; copy the model before offload"
    )
