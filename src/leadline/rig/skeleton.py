"""The model without its weights: real modules on the meta device, buffers computed.

`transformers` builds the model from the checkpoint's configuration; no parameter has
memory until a layer's turn comes (`leadline.rig.weights`). Buffers that no checkpoint
holds, rotary tables among them, are computed by the model's own initialisation.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from leadline.core.errors import UsageError
from leadline.rig.experts import EXPERTS_IMPLEMENTATION
from leadline.rig.families import experts_modules, refuse_unsupported

GATHER_TABLE_BYTES = 64 * 2**20
"""An embedding inside a decoder layer that is larger is a gather table (B2)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Skeleton:
    """A causal language model on meta, and the names of its parts."""

    model: nn.Module
    """With head: its names are those that the checkpoint's tensors map to."""
    body: nn.Module
    """The base model: ids to hidden states; what a pass runs."""
    body_name: str
    layers: nn.ModuleList
    layers_name: str
    config: Any
    """Text configuration."""
    dtype: torch.dtype

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.layers)

    def layer_name(self, index: int) -> str:
        """Full name of decoder layer *index*."""
        return f"{self.layers_name}.{index}"

    def layer_state(self, index: int) -> list[str]:
        """Full names of what decoder layer *index* reads from the checkpoint, in module order."""
        prefix = self.layer_name(index)
        return [f"{prefix}.{name}" for name in self.layers[index].state_dict()]

    def entry_state(self) -> list[str]:
        """Names of what stands outside the layers inside the body: embeddings, norms, mixers."""
        inside = self.layers_name + "."
        names = (f"{self.body_name}.{n}" if self.body_name else n for n in self.body.state_dict())
        return [name for name in names if not name.startswith(inside)]

    def experts(self, index: int) -> dict[str, Any]:
        """Routed experts of decoder layer *index* by their name inside it."""
        return dict(experts_modules(self.layers[index]))

    def linears(self, index: int) -> dict[str, nn.Linear]:
        """Linear projections of decoder layer *index* by their name inside it."""
        modules = self.layers[index].named_modules()
        return {name: module for name, module in modules if isinstance(module, nn.Linear)}

    def gather_tables(self, index: int, floor: int = GATHER_TABLE_BYTES) -> dict[str, nn.Embedding]:
        """Embeddings inside decoder layer *index* of at least *floor* bytes, by name inside it."""
        return {
            name: module
            for name, module in self.layers[index].named_modules()
            if isinstance(module, nn.Embedding)
            and module.weight.numel() * module.weight.element_size() >= floor
        }

    def residual_width(self) -> int:
        """Elements of the residual stream a token: hidden size times residual streams.

        Found by running the body on meta up to its first layer.
        """
        widths: list[int] = []

        def stop(module: nn.Module, args: Any, kwargs: Any) -> None:
            del module
            widths.append(hidden_argument(args, kwargs).shape[-1])
            raise _FirstLayerReached

        handle = self.layers[0].register_forward_pre_hook(stop, with_kwargs=True)
        try:
            with torch.no_grad(), _on_meta(self.body):
                self.body(input_ids=torch.zeros(1, 2, dtype=torch.int64, device="meta"))
        except _FirstLayerReached:
            pass
        finally:
            handle.remove()
        return widths[0]


class _FirstLayerReached(Exception):  # noqa: N818 - not a fault
    """Ends the look at the residual stream."""


def hidden_argument(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return the residual stream among the arguments of a decoder layer."""
    hidden = args[0] if args else kwargs["hidden_states"]
    assert isinstance(hidden, Tensor)
    return hidden


def build_skeleton(checkpoint: Path, *, dtype: torch.dtype, device: torch.device) -> Skeleton:
    """Build the model of *checkpoint* on meta with its buffers on *device*.

    Raises:
        UsageError: the architecture is not one that `transformers` builds as a causal
            language model with decoder layers, or its experts do not go through the
            experts interface.
    """
    config = read_config(checkpoint)
    refuse_unsupported(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config,
            dtype=dtype,
            experts_implementation=EXPERTS_IMPLEMENTATION,
        )
    model.eval().requires_grad_(False)
    _keep_in_fp32(model)
    _compute_buffers(model, device)
    body_name, body, layers_name, layers = _find_layers(model)
    return Skeleton(
        model=model,
        body=body,
        body_name=body_name,
        layers=layers,
        layers_name=layers_name,
        config=model.config.get_text_config(),
        dtype=dtype,
    )


def read_config(checkpoint: Path) -> Any:
    """Read `config.json` of *checkpoint*; code inside a checkpoint is never run."""
    if not (checkpoint / "config.json").is_file():
        raise UsageError(
            f"{checkpoint} holds no config.json; give the folder of a Hugging Face checkpoint"
        )
    try:
        return AutoConfig.from_pretrained(checkpoint, trust_remote_code=False)
    except (ValueError, KeyError, OSError) as error:
        first = str(error).strip().split("\n")[0]
        raise UsageError(
            f"transformers cannot read {checkpoint / 'config.json'}: {first}"
        ) from error


def _keep_in_fp32(model: Any) -> None:
    """Widen what the family says must stay in fp32, as `from_pretrained` does."""
    patterns = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    for module_name, module in model.named_modules():
        for kind in (module._parameters, module._buffers):
            for name, value in kind.items():
                full = f"{module_name}.{name}"
                narrow = value is not None and value.dtype == torch.bfloat16
                if narrow and any(pattern in full for pattern in patterns):
                    wide = value.to(torch.float32)
                    keep = isinstance(value, nn.Parameter)
                    kind[name] = nn.Parameter(wide, requires_grad=False) if keep else wide


def _compute_buffers(model: Any, device: torch.device) -> None:
    """Give buffers memory on *device* and let the model's own initialisation fill them."""
    for name, value in model.state_dict(keep_vars=True).items():
        del name
        value._is_hf_initialized = True
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            fresh = torch.empty_like(buffer, device=device)
            if getattr(buffer, "_is_hf_initialized", False):
                fresh._is_hf_initialized = True  # type: ignore[attr-defined]
            module._buffers[name] = fresh
    model.initialize_weights()


def _find_layers(model: Any) -> tuple[str, nn.Module, str, nn.ModuleList]:
    """Find the body and the module list that holds its decoder layers.

    The list is the one as long as the configuration says, nearest to the root.
    """
    wanted = model.config.get_text_config().num_hidden_layers
    found = [
        (name.count("."), name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == wanted
    ]
    if not found:
        raise UsageError(
            f"{type(model).__name__} keeps no list of its {wanted} decoder layers; a layer pass "
            "needs one"
        )
    _, layers_name, layers = min(found, key=lambda item: item[:2])
    body_name = layers_name.rpartition(".")[0]
    return body_name, model.get_submodule(body_name), layers_name, layers


class _on_meta:  # noqa: N801 - reads as a verb at its use
    """Buffers of a module on meta for a moment, so that a shape can be asked for."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._kept: list[tuple[nn.Module, str, Tensor]] = []

    def __enter__(self) -> None:
        for module in self._module.modules():
            for name, buffer in _own_buffers(module):
                self._kept.append((module, name, buffer))
                module._buffers[name] = buffer.to("meta")

    def __exit__(self, *error: object) -> None:
        for module, name, buffer in self._kept:
            module._buffers[name] = buffer


def _own_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from list(module.named_buffers(recurse=False))
