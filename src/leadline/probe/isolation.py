"""A place to run a model in which nothing it does outlives the block.

Inside: no gradients, TF32 off, compiled code run eagerly (an operation can only be
seen when it is called from Python), dropout off. Put back afterwards, whatever
happens: matmul precision, compiled calls, training flags, buffers, random states.

Dropout is taken out at the function, not by `eval()`: batch norms and a model's own
branches keep their training behaviour, and a mask drawn for bf16 numbers would not
be the mask drawn for fp32 ones.
"""

import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from leadline.train.precision import Precision, precision_context

RandomState = tuple[Tensor, ...]

_DROPOUTS = frozenset(
    {
        F.dropout,
        F.dropout1d,
        F.dropout2d,
        F.dropout3d,
        F.alpha_dropout,
        F.feature_alpha_dropout,
        torch.dropout,
        torch.dropout_,
        torch.feature_dropout,
        torch.feature_dropout_,
        torch.alpha_dropout,
        torch.alpha_dropout_,
        torch.feature_alpha_dropout,
        torch.feature_alpha_dropout_,
    }
)
_SDPA_DROPOUT_POSITION = 4


@contextmanager
def isolated(model: nn.Module, device_type: str) -> Iterator["Buffers"]:
    """Run the block with *model* eager, dropout-free, in true fp32 and without gradients."""
    buffers = Buffers(model)
    training = [(module, module.training) for module in model.modules()]
    compiled = [(module, module._compiled_call_impl) for module in model.modules()]
    torch_random, python_random = random_state(device_type), random.getstate()
    for module, _ in compiled:
        module._compiled_call_impl = None
    try:
        with (
            precision_context(Precision.FP32, device_type),
            torch.no_grad(),
            _eager_stance(),
            _DropoutOff(),
        ):
            yield buffers
    finally:
        for module, flag in training:
            module.training = flag
        for module, call in compiled:
            module._compiled_call_impl = call
        buffers.restore()
        set_random_state(device_type, torch_random)
        random.setstate(python_random)


def random_state(device_type: str) -> RandomState:
    """States of torch's CPU generator and of the device's generators."""
    states = [torch.get_rng_state()]
    if device_type != "cpu":
        states.append(torch.get_device_module(device_type).get_rng_state())
    return tuple(states)


def set_random_state(device_type: str, state: RandomState) -> None:
    """Put back what `random_state` returned."""
    torch.set_rng_state(state[0])
    if device_type != "cpu":
        torch.get_device_module(device_type).set_rng_state(state[1])


def same_random_state(one: RandomState, other: RandomState) -> bool:
    """Whether nothing was drawn between the two states."""
    return all(torch.equal(left, right) for left, right in zip(one, other, strict=True))


class Buffers:
    """The buffers of a model as they were, and the way back to them."""

    def __init__(self, model: nn.Module) -> None:
        self._kept = {
            module: [(name, b, None if b is None else b.clone()) for name, b in held.items()]
            for module in model.modules()
            if (held := module._buffers)
        }

    def restore(self, modules: Iterable[nn.Module] | None = None) -> None:
        """Put the buffers of *modules*, by default of all, back in place and value.

        Always by copying: a batch norm changes its running figures without their version.
        """
        with torch.no_grad():
            for module in self._kept if modules is None else modules:
                for name, buffer, copy in self._kept.get(module, ()):
                    module._buffers[name] = buffer
                    if buffer is not None and copy is not None:
                        buffer.copy_(copy)


class _DropoutOff(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        del types
        kwargs = dict(kwargs or {})
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func is F.multi_head_attention_forward:
            kwargs["training"] = False
        if func is F.scaled_dot_product_attention:
            if len(args) > _SDPA_DROPOUT_POSITION:
                after = args[_SDPA_DROPOUT_POSITION + 1 :]
                args = (*args[:_SDPA_DROPOUT_POSITION], 0.0, *after)
            else:
                kwargs["dropout_p"] = 0.0
        return func(*args, **kwargs)


def _eager_stance() -> AbstractContextManager[Any]:
    # Nothing compiled exists before one of these is imported, and importing them takes seconds.
    if "torch._dynamo" in sys.modules or "torch.nn.attention.flex_attention" in sys.modules:
        stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
        return stance
    return nullcontext()
