"""The trainer's weights as the server's checkpoint names them, one full tensor after the other, in bounded memory.

Plain, DDP, ZeRO-3 and FSDP2 models, with LoRA adapters (peft) merged in on the way. Every rank walks over all weights,
because gathering a sharded one is a collective.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from grpo_vlm.errors import RolloutError
from grpo_vlm.rollout.lora import adapted_layers, without_adapters

WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.", "_fsdp_wrapped_module.", "_forward_module.")
TOWERS = ("visual.", "vision_tower.", "vision_model.")  # parts of names


@dataclass(frozen=True)
class Weight:
    """One tensor of the checkpoint: `build` makes it of the full `parameters`. moves: whether training changes it."""

    name: str
    parameters: tuple[Tensor, ...]
    moves: bool
    build: Callable[[Sequence[Tensor]], Tensor] = lambda tensors: tensors[0]

    @property
    def block(self) -> str:
        """The part of the model within which vLLM fuses weights (q, k and v; gate and up). It can only be loaded
        whole: a fused tensor of which one part is missing would be filled with garbage."""
        return ".".join(self.name.split(".")[:-2])

    @property
    def in_tower(self) -> bool:
        """Whether features of pictures depend on it."""
        return any(part in self.name for part in TOWERS)


def weights(model: nn.Module, accelerator: Any) -> list[Weight]:
    """All weights of a model, in the order of its modules; nothing is gathered.

    A head tied to the embeddings is named too: vLLM on a CPU packs it apart from them, and it would stay stale.
    """
    module = accelerator.unwrap_model(model)
    plain, layers = without_adapters(module), {id(layer.base): layer for layer in adapted_layers(module)}
    tied = tied_head(plain)
    found = []
    for name, tensor in stored_tensors(plain):
        layer = layers.get(id(tensor))
        if layer is not None and tensor is tied:
            raise RolloutError(f"{name}: a head tied to embeddings with adapters cannot be merged for the server")
        if layer is not None:
            found.append(Weight(name, layer.parameters, layer.moves, layer.merge))
        else:
            moves = tensor.requires_grad or not isinstance(tensor, nn.Parameter)  # a buffer that is stored may count
            found.append(Weight(name, (tensor,), moves))
        if tensor is tied:
            found.append(Weight("lm_head.weight", (tensor,), tensor.requires_grad))
    assert found, f"{type(plain).__name__} shows no weights"
    return found


def tied_head(module: nn.Module) -> Tensor | None:
    """The embeddings that are the head's weight too, when they are."""
    embeddings, head = module.get_input_embeddings(), module.get_output_embeddings()
    return head.weight if head is not None and head.weight is embeddings.weight else None


def stored_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(checkpoint name, parameter or buffer) of all that save_pretrained would write, without an adapter's own; a
    tensor that two modules share once."""
    seen: set[int] = set()
    for prefix, part in module.named_modules():
        tensors = [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]
        for key, tensor in tensors:
            if key in part._non_persistent_buffers_set:
                continue
            name = clean(f"{prefix}.{key}" if prefix else key)
            if name is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                yield name, tensor


def clean(name: str) -> str | None:
    """The checkpoint's name of a parameter, without what wraps modules; None for an adapter's own."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    name = re.sub(r"\.modules_to_save\.[^.]+\.", ".", name).replace(".base_layer.", ".")
    return None if ".lora_" in name or ".original_module." in name else name


def moving(found: Sequence[Weight]) -> list[Weight]:
    """The weights of all blocks in which something trains."""
    blocks = {weight.block for weight in found if weight.moves}
    return [weight for weight in found if weight.block in blocks]


def gathered(found: Sequence[Weight], accelerator: Any) -> Iterator[tuple[str, Tensor]]:
    """(name, full tensor), one after the other, on all ranks. A tensor is valid until the next one is asked for."""
    zero3 = is_zero3(accelerator)
    for weight in found:
        with _whole(weight.parameters, zero3):
            yield weight.name, weight.build([full(parameter) for parameter in weight.parameters])


def _whole(parameters: Sequence[Tensor], zero3: bool) -> AbstractContextManager[Any]:
    """While the block runs, the parameters that ZeRO-3 has cut up are whole."""
    if not zero3:
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters([part for part in parameters if isinstance(part, nn.Parameter)])


@contextmanager
def written(target: nn.Parameter, source: nn.Parameter, accelerator: Any) -> Iterator[None]:
    """While the block runs, both are whole where ZeRO-3 has cut them up, and what it writes into `target` is kept."""
    if not is_zero3(accelerator):
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters([source]), deepspeed.zero.GatheredParameters([target], modifier_rank=0):
        yield


def full(parameter: Tensor) -> Tensor:
    """The whole tensor of a parameter; a collective for one that FSDP2 has cut up."""
    data = parameter.detach()
    return data.full_tensor() if isinstance(data, DTensor) else data


def is_zero3(accelerator: Any) -> bool:
    """Whether DeepSpeed has cut up the parameters."""
    plugin = accelerator.state.deepspeed_plugin
    return plugin is not None and plugin.zero_stage == 3


def largest_bytes(found: Sequence[Weight], accelerator: Any, dtype: torch.dtype) -> int:
    """Bytes of the largest weight once it is cast to `dtype`."""
    zero3 = is_zero3(accelerator)

    def size(tensor: Tensor) -> int:
        count = tensor.ds_numel if zero3 and isinstance(tensor, nn.Parameter) else math.prod(tensor.shape)
        return count * (dtype.itemsize if tensor.is_floating_point() else tensor.element_size())

    return max((size(weight.parameters[0]) for weight in found), default=0)
