"""Making a recorded call again, alone, in three ways.

Every replay starts from the recorded fp32 arguments, buffers and random state, on
copies, so an error found is the module's own and a module that writes to its
arguments does no harm.

- `in_bfloat16`: as the bf16 lane runs it: under autocast, each argument cast to the
  dtype the lane really handed over. A norm behind a projection gets bf16 there, and a
  replay on fp32 would never see it fail.
- `in_best_case`: fp32 arithmetic on arguments rounded like the lane's, with matrix
  products rounded as autocast cannot avoid. Its error is what no care could prevent.
- `exactly`: plain fp32 again, which proves that a call can be replayed at all.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from leadline.probe.callwatch import Call, CallDtypes, Frame
from leadline.probe.isolation import Buffers, set_random_state
from leadline.probe.optrace import LOW_PRECISION, MatmulRounding
from leadline.probe.tensortree import map_tensors, tensors_in

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def autocast(device_type: str, *, enabled: bool) -> torch.autocast:
    """The bf16 lane's autocast, or none; without the cache, which would keep weights."""
    return torch.autocast(device_type, dtype=torch.bfloat16, enabled=enabled, cache_enabled=False)


class Replayer:
    """Replays calls of one model; must live inside `isolated`."""

    def __init__(
        self,
        run_all: Callable[[], Any],
        lane: dict[Frame, CallDtypes],
        names: dict[nn.Module, str],
        buffers: Buffers,
        device_type: str,
    ) -> None:
        self._run_all = run_all
        self._names = names
        self._lane = lane
        self._buffers = buffers
        self._device_type = device_type

    def exactly(self, call: Call) -> list[Tensor]:
        """The call's floating-point results in fp32."""
        with autocast(self._device_type, enabled=False):
            return self._run(call, map_tensors(call.arguments, torch.clone))

    def in_bfloat16(self, call: Call, held: Collection[nn.Module]) -> list[Tensor]:
        """The call's results in the bf16 lane, with the modules of *held* kept in fp32."""
        wanted = iter(self._lane_dtypes(call))

        def cast(tensor: Tensor) -> Tensor:
            copy = tensor.clone()
            dtype = next(wanted, tensor.dtype)
            return copy.to(dtype) if dtype in LOW_PRECISION else copy

        with self._held_in_fp32(held), autocast(self._device_type, enabled=True):
            return self._run(call, map_tensors(call.arguments, cast))

    def in_best_case(self, call: Call, generator: torch.Generator | None) -> list[Tensor]:
        """The call's results in a bf16 lane without avoidable rounding."""
        wanted = iter(self._lane_dtypes(call))
        mode = MatmulRounding(generator)

        def round_like_lane(tensor: Tensor) -> Tensor:
            copy = tensor.clone()
            return mode.round(copy) if next(wanted, tensor.dtype) in LOW_PRECISION else copy

        arguments = map_tensors(call.arguments, round_like_lane)
        with autocast(self._device_type, enabled=False), mode:
            return self._run(call, arguments)

    def _run(self, call: Call, arguments: Arguments) -> list[Tensor]:
        set_random_state(self._device_type, call.random)
        if call.module is None:
            self._buffers.restore()
            return floating(self._run_all())
        self._buffers.restore(call.module.modules())
        args, kwargs = arguments
        return floating(call.module(*args, **kwargs))

    def _lane_dtypes(self, call: Call) -> tuple[torch.dtype, ...]:
        # A call the lane did not make (an expert that got no token) keeps its fp32 arguments.
        known = self._lane.get(call.frame)
        count = len(tensors_in(call.arguments))
        return known.arguments if known and len(known.arguments) == count else ()

    @contextmanager
    def _held_in_fp32(self, held: Collection[nn.Module]) -> Iterator[None]:
        """Run the modules of *held* in fp32 and give their results in the lane's dtype."""
        with ExitStack() as hooks, ExitStack() as contexts:

            def enter(_: nn.Module, args: Any, kwargs: Any) -> Arguments:
                entered.append(contexts.enter_context(ExitStack()))
                entered[-1].enter_context(autocast(self._device_type, enabled=False))
                widened: Arguments = map_tensors((args, kwargs), _widen)
                return widened

            def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
                del args, kwargs
                entered.pop().close()
                return self._as_lane_gives(module, output)

            entered: list[ExitStack] = []
            for module in held:
                for handle in (
                    module.register_forward_pre_hook(enter, with_kwargs=True),
                    module.register_forward_hook(leave, with_kwargs=True),
                ):
                    hooks.callback(handle.remove)
            yield

    def _as_lane_gives(self, module: nn.Module, output: Any) -> Any:
        known = self._lane.get(Frame(name=self._names[module], nth=0))
        if known is None or len(known.output) != len(tensors_in(output)):
            return output
        wanted = iter(known.output)

        def cast(tensor: Tensor) -> Tensor:
            dtype = next(wanted)
            return tensor.to(dtype) if tensor.is_floating_point() else tensor

        return map_tensors(output, cast)


def floating(output: Any) -> list[Tensor]:
    """The floating-point tensors of a call's output."""
    return [tensor for tensor in tensors_in(output) if tensor.is_floating_point()]


def _widen(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in LOW_PRECISION else tensor
