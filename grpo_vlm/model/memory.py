"""What a GPU holds in training, by part, from numbers of parameters alone: no weights, no accelerator.

Bytes are those of tensors. What the driver takes for a process is a part of its own; what an allocator reserves and
does not use comes on top (measured: 1 to 27 % with rows of changing length).
"""

from dataclasses import dataclass

from grpo_vlm.config import Config
from grpo_vlm.config.check_sharding import DDP, FSDP2, ZERO, Launched
from grpo_vlm.config.values import is_bf16

DRIVER_BYTES = 0.8e9  # a process's context and libraries; measured on an H200
ZERO_BUCKET = 5e8  # numbers in DeepSpeed's bucket of gradients (ZeRO-2 fills one while the other is sent)
ZERO_LIVE = 1e9  # numbers of gathered weights that ZeRO-3 keeps at most
BF16, FLOAT32 = 2, 4


@dataclass(frozen=True)
class Counts:
    """Parameters of a policy. total: of the model without adapters; trained: with gradients (with LoRA the adapters
    alone); adapters: of these, 0 without LoRA. block: of the largest layer; outside: of what is in no layer
    (embeddings, head)."""

    total: int
    trained: int
    adapters: int
    block: int
    outside: int


@dataclass(frozen=True)
class Part:
    """Bytes of one kind. at: "always", or only in the "update" or in the "generation" of answers."""

    name: str
    bytes: float
    at: str = "always"


@dataclass(frozen=True)
class Widths:
    """Bytes of a number: of a weight, a gradient, and of the optimizer's states of a weight (float32 masters
    included). cast: the computation runs on bf16 copies of float32 weights, made by autocast (`autocast`) or by the
    sharding scheme."""

    weight: int
    gradient: int
    states: float
    cast: bool
    autocast: bool

    @property
    def computed(self) -> int:
        """Of a weight as the layers see it."""
        return BF16 if self.cast else self.weight

    @classmethod
    def of(cls, config: Config, launch: Launched, *, accelerator: bool, adapters: bool) -> "Widths":
        """accelerator: whether one computes; a CPU computes in the weights' own type. adapters: those are what is
        trained, in float32."""
        fsdp, strategy = config.worker.actor.fsdp, config.worker.actor.optim.strategy
        weight = BF16 if is_bf16(fsdp.torch_dtype) else FLOAT32
        cast = accelerator and weight == FLOAT32 and is_bf16(fsdp.mp_param_dtype)
        trained = FLOAT32 if adapters else weight
        if launch.kind == ZERO:  # float32 masters and moments beside what computes
            lower = trained == BF16 or cast
            low = BF16 if lower else FLOAT32
            return cls(BF16 if cast else weight, low, 8 + (4 if lower else 0), False, False)
        states = {"adamw": 2 * trained, "adamw_8bit": 2.1, "adamw_bf16": 4 + (2 if trained == BF16 else 0)}[strategy]
        return cls(weight, trained, states, cast, cast and launch.kind != FSDP2)


def training_parts(
    counts: Counts,
    widths: Widths,
    launch: Launched,
    world_size: int,
    *,
    reference: bool,
    checkpointing: bool,
    keeps_gathered: bool = False,
    offload: tuple[bool, bool] = (False, False),
) -> list[Part]:
    """All but a row's activations. reference: a frozen copy of the model is there. keeps_gathered: FSDP2 keeps
    gathered weights until the backward pass. offload: weights, optimizer states lie in CPU memory while
    answers are generated.
    """
    sharded = launch.cuts_weights
    weight_share = 1 / world_size if sharded else 1.0
    state_share = 1 / world_size if sharded or (launch.kind == ZERO and launch.stage >= 1) else 1.0
    gradient_share = 1 / world_size if sharded or (launch.kind == ZERO and launch.stage >= 2) else 1.0
    weights = weight_share * (counts.total * widths.weight + counts.adapters * FLOAT32)
    states = state_share * counts.trained * widths.states
    host = launch.weights_on_cpu, launch.optimizer_on_cpu or (launch.kind == FSDP2 and launch.weights_on_cpu)
    if host[0]:
        weights = 0.0
    parts = [
        Part("weights", weights, "update" if offload[0] else "always"),
        Part("optimizer states", 0.0 if host[1] else states, "update" if offload[1] else "always"),
        Part("gradients", gradient_share * counts.trained * widths.gradient, "update"),
    ]
    if reference:
        parts.append(Part("reference model", 0.0 if host[0] else weight_share * counts.total * widths.weight))
    if widths.autocast and not (counts.adapters and checkpointing):
        parts.append(Part("bf16 copies of the weights", counts.total * BF16, "update"))
    scheme = _scheme(counts, widths, launch, sharded, keeps_gathered)
    if world_size > 1 and scheme:
        parts.append(Part("buffers of the sharding scheme", scheme, "update"))
    return parts


def _scheme(counts: Counts, widths: Widths, launch: Launched, sharded: bool, keeps_gathered: bool) -> float:
    """What is gathered or about to be sent."""
    if launch.kind == DDP:  # its buckets hold a second copy of the gradients
        return counts.trained * widths.gradient
    if launch.kind == FSDP2:  # the layer that computes and the next one; the gradients of one, to be summed in float32
        held = counts.total if keeps_gathered else counts.outside + 2 * counts.block
        return held * widths.computed + min(counts.trained, counts.block) * FLOAT32
    if sharded:
        live = min(counts.total, ZERO_LIVE + counts.outside)
        return (live + min(counts.trained, ZERO_BUCKET)) * widths.computed
    return 2 * min(counts.trained, ZERO_BUCKET) * widths.gradient
