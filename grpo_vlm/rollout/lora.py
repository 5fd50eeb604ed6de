"""LoRA layers of a peft model, for the two ways in which they reach the server: merged into the weights, or as an
adapter's files.

peft renames what it wraps: the weight W of a layer becomes `base_layer.weight`, beside it stand A and B per adapter,
and a module that is trained whole lies in `modules_to_save`. Merged means W + scale * B A, in float32.
Source of the formula: LoRA, arXiv 2106.09685, section 4.1; scale is alpha / r, or alpha / sqrt(r) with rsLoRA.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from torch import Tensor, nn

from grpo_vlm.errors import RolloutError


@dataclass(frozen=True, eq=False)
class Adapted:
    """A layer with adapters. base: its weight. parts: (A, B, scale) of each adapter in use.

    transposed: W is stored as [in, out] (`fan_in_fan_out`), as the rows of an embedding are.
    """

    base: Tensor
    parts: tuple[tuple[Tensor, Tensor, float], ...]
    transposed: bool

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        """What must be gathered to merge: the base, then A and B of each adapter."""
        return (self.base, *(tensor for a, b, _ in self.parts for tensor in (a, b)))

    @property
    def moves(self) -> bool:
        """Whether training changes the merged weight."""
        return any(tensor.requires_grad for tensor in self.parameters)

    def merge(self, tensors: Sequence[Tensor]) -> Tensor:
        """The merged weight, of full tensors in the order of `parameters`, in the base's dtype."""
        base, *rest = tensors
        total = base.float()
        for (_, _, scale), a, b in zip(self.parts, rest[::2], rest[1::2], strict=True):
            delta = b.float() @ a.float()
            total = total + scale * (delta.T if self.transposed else delta)
        return total.to(base.dtype)


def is_peft(module: nn.Module) -> bool:
    """Whether peft has wrapped the model."""
    return _peft() is not None and isinstance(module, _peft().PeftModel)


def _peft() -> Any | None:
    """peft, when something has imported it; a model cannot have adapters otherwise."""
    return sys.modules.get("peft")


def without_adapters(module: nn.Module) -> nn.Module:
    """The model inside peft's wrapper, or the model itself. Its layers may still be wrapped."""
    return module.get_base_model() if is_peft(module) else module


def adapted_layers(module: nn.Module) -> Iterator[Adapted]:
    """The layers that carry LoRA adapters. RolloutError for a kind of adapter whose merged weight is not W + s B A."""
    if not is_peft(module):
        return
    from peft.tuners.lora import Embedding, Linear, LoraLayer
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, layer in module.named_modules():
        if not isinstance(layer, BaseTunerLayer):
            continue
        if not isinstance(layer, Linear | Embedding) or not isinstance(layer, LoraLayer):
            raise RolloutError(f"{name}: {type(layer).__name__} cannot be merged for the server; LoRA of Linear can")
        active = [] if layer.disable_adapters or layer.merged else layer.active_adapters
        strange = [key for key in active if key in layer.lora_variant or layer.lora_bias.get(key)]
        if strange:
            raise RolloutError(f"{name}: DoRA and LoRA biases ({', '.join(strange)}) cannot be merged for the server")
        embeds = isinstance(layer, Embedding)
        parts = tuple(
            (layer.lora_embedding_A[key], layer.lora_embedding_B[key], layer.scaling[key])
            if embeds
            else (layer.lora_A[key].weight, layer.lora_B[key].weight, layer.scaling[key])
            for key in active
            if key in (layer.lora_embedding_A if embeds else layer.lora_A)
        )
        yield Adapted(layer.get_base_layer().weight, parts, embeds or layer.fan_in_fan_out)


@dataclass(frozen=True)
class AdapterFiles:
    """What a folder of an adapter holds. config: of adapter_config.json. tensors: name there -> parameter."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]


def adapter_files(module: nn.Module) -> AdapterFiles:
    """The adapter in use as peft's save_pretrained would write it; nothing is gathered.

    RolloutError when more than an adapter trains, because the server would not get the rest.
    """
    if not is_peft(module):
        raise RolloutError("worker.rollout.lora_sync: adapter needs a model with LoRA adapters; set it to merged")
    (name,) = module.active_adapters
    others = [key for key, value in module.named_parameters() if value.requires_grad and ".lora_" not in key]
    if others:
        raise RolloutError(
            f"worker.rollout.lora_sync: adapter cannot bring {others[0]} to the server, which trains beside the "
            "adapters; set it to merged"
        )
    tensors = {
        key.replace(f".{name}.", ".").removesuffix(f".{name}"): value
        for key, value in module.named_parameters()
        if ".lora_" in key and f".{name}" in key
    }
    config = {key: _plain(value) for key, value in module.peft_config[name].to_dict().items()}
    return AdapterFiles(config | {"inference_mode": True}, tensors)


def _plain(value: Any) -> Any:
    """A value as JSON holds it."""
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, set | list | tuple):
        return sorted(value) if isinstance(value, set) else [_plain(item) for item in value]
    return value.value if isinstance(value, Enum) else value
