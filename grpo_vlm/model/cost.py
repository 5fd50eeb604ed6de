"""What a row costs before it runs: floating-point operations, seconds and bytes, from the model's shape alone.

A matrix of m x n parameters takes 2mn operations per token; attention takes 4 x heads x head size per query-key pair
(scores and values). Norms, rotations and activations are left out of the operations.

Shape legend: h hidden size, V vocabulary, patches = time x height x width of a processed picture, merge**2 patches of
which become one feature.
"""

from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import Any, Literal

import torch
from transformers import PretrainedConfig

from grpo_vlm.model.packing import Load

# Dense bfloat16 TFLOP/s with float32 accumulation, by the whole name that the driver reports: "NVIDIA H20" is the
# beginning of "NVIDIA H200" and has a fifth of its speed. Data sheets, but for the H200: 790 is what large matrix
# products were measured to reach there (its data sheet says 989), so an MFU of 1 means the best that was seen.
PEAK_TFLOPS = {
    "NVIDIA H200": 790.0,
    "NVIDIA GH200 480GB": 989.4,
    "NVIDIA H100 80GB HBM3": 989.4,
    "NVIDIA H100 PCIe": 756.0,
    "NVIDIA H100 NVL": 835.0,
    "NVIDIA H800": 989.4,
    "NVIDIA H20": 148.0,
    "NVIDIA B200": 2250.0,
    "NVIDIA A100-SXM4-40GB": 312.0,
    "NVIDIA A100-SXM4-80GB": 312.0,
    "NVIDIA A100-PCIE-40GB": 312.0,
    "NVIDIA A100 80GB PCIe": 312.0,
    "NVIDIA A800-SXM4-80GB": 312.0,
    "NVIDIA A800 80GB PCIe": 312.0,
    "NVIDIA A40": 149.7,
    "NVIDIA A10": 125.0,
    "NVIDIA A10G": 70.0,
    "NVIDIA L40S": 362.0,
    "NVIDIA L40": 181.0,
    "NVIDIA L4": 121.0,
    "NVIDIA RTX 6000 Ada Generation": 364.2,
    "NVIDIA RTX A6000": 154.8,
    "NVIDIA GeForce RTX 3090": 71.0,
    "NVIDIA GeForce RTX 4090": 165.2,
    "NVIDIA GeForce RTX 5090": 209.5,
}
GENERIC_TFLOPS = 100.0  # an unknown accelerator: good for comparing rows, not for telling the time
CPU_TFLOPS = 0.1
ADAPTER_WIDTH = 4  # bytes a number: PEFT makes adapters in float32, whatever the model's type


@dataclass(frozen=True)
class Blocks:
    """A stack of transformer layers. *_width: heads x head size of the queries, of the keys."""

    layers: int
    hidden: int
    query_width: int
    key_width: int
    intermediate: int
    mlp_matrices: int  # 3 with a gate

    @property
    def parameters(self) -> int:
        """Linear parameters, biases left out."""
        attention = 2 * self.hidden * (self.query_width + self.key_width)
        return self.layers * (attention + self.mlp_matrices * self.hidden * self.intermediate)


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a vision-language model that its cost depends on.

    out: size of a feature. mergers: how many, DeepStack's included. patch_dim: numbers in a patch. window: side of a
    vision attention window in merged units, 0 where there are none; full_layers: vision layers that attend within the
    whole frame.
    """

    text: Blocks
    vision: Blocks
    vocabulary: int
    patch_dim: int
    merge: int
    out: int
    mergers: int
    window: int
    full_layers: int

    @classmethod
    def of(cls, config: PretrainedConfig) -> "ModelShape | None":
        """Of a Qwen2-VL, Qwen2.5-VL or Qwen3-VL configuration; None for another family."""
        if config.model_type not in _VISION_SIZES:
            return None
        text, vision = config.text_config, config.vision_config
        head = text.head_dim if config.model_type == "qwen3_vl" else text.hidden_size // text.num_attention_heads
        return cls(
            text=Blocks(
                layers=text.num_hidden_layers,
                hidden=text.hidden_size,
                query_width=text.num_attention_heads * head,
                key_width=text.num_key_value_heads * head,
                intermediate=text.intermediate_size,
                mlp_matrices=3,
            ),
            vocabulary=text.vocab_size,
            patch_dim=vision.in_channels * vision.temporal_patch_size * vision.patch_size**2,
            merge=vision.spatial_merge_size,
            **_VISION_SIZES[config.model_type](vision),
        )

    @property
    def merger_parameters(self) -> int:
        joined = self.vision.hidden * self.merge**2
        return self.mergers * joined * (joined + self.out)

    @property
    def head_parameters(self) -> int:
        return self.vocabulary * self.text.hidden


def _qwen2_vl(vision: PretrainedConfig) -> dict[str, Any]:
    width = vision.embed_dim
    blocks = Blocks(vision.depth, width, width, width, int(width * vision.mlp_ratio), mlp_matrices=2)
    return {"vision": blocks, "out": vision.hidden_size, "mergers": 1, "window": 0, "full_layers": vision.depth}


def _qwen2_5_vl(vision: PretrainedConfig) -> dict[str, Any]:
    width = vision.hidden_size
    return {
        "vision": Blocks(vision.depth, width, width, width, vision.intermediate_size, mlp_matrices=3),
        "out": vision.out_hidden_size,
        "mergers": 1,
        "window": vision.window_size // vision.patch_size // vision.spatial_merge_size,
        "full_layers": len(vision.fullatt_block_indexes),
    }


def _qwen3_vl(vision: PretrainedConfig) -> dict[str, Any]:
    width = vision.hidden_size
    return {
        "vision": Blocks(vision.depth, width, width, width, vision.intermediate_size, mlp_matrices=2),
        "out": vision.out_hidden_size,
        "mergers": 1 + len(vision.deepstack_visual_indexes),
        "window": 0,
        "full_layers": vision.depth,
    }


_VISION_SIZES = {"qwen2_vl": _qwen2_vl, "qwen2_5_vl": _qwen2_5_vl, "qwen3_vl": _qwen3_vl}


# ---------------------------------------------------------------- operations


@dataclass(frozen=True)
class Flops:
    """Operations by part: linear layers of the text model, its attention, those of the vision tower, the head."""

    text: float = 0.0
    attention: float = 0.0
    vision: float = 0.0
    vision_attention: float = 0.0
    head: float = 0.0

    @property
    def total(self) -> float:
        return self.text + self.attention + self.vision + self.vision_attention + self.head

    def __add__(self, other: "Flops") -> "Flops":
        return Flops(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def times(self, factors: "Flops") -> "Flops":
        return Flops(*(a * b for a, b in zip(astuple(self), astuple(factors), strict=True)))


@dataclass(frozen=True)
class Mode:
    """How a row is trained on.

    vision: "train"; "forward" when the tower is frozen; "cached" when its features are there already.
    adapters: only adapters get weight gradients (LoRA). checkpointing: layers run forward again in the backward pass.
    """

    vision: Literal["train", "forward", "cached"] = "train"
    adapters: bool = False
    checkpointing: bool = False


TRAIN_ALL = Mode()


def forward_flops(shape: ModelShape, load: Load) -> Flops:
    """Of one forward pass without gradient: F_fwd of the metrics, with exact pairs for attention."""
    patches = sum(t * h * w for t, h, w in load.grids)
    full = sum(t * (h * w) ** 2 for t, h, w in load.grids)
    windowed = sum(_window_pairs(shape, grid) for grid in load.grids) if shape.window else 0
    pairs = shape.full_layers * full + (shape.vision.layers - shape.full_layers) * windowed
    per_patch = shape.vision.parameters + shape.patch_dim * shape.vision.hidden
    return Flops(
        text=2.0 * shape.text.parameters * load.tokens,
        attention=4.0 * shape.text.query_width * shape.text.layers * load.pairs,
        vision=2.0 * patches * (per_patch + shape.merger_parameters / shape.merge**2),
        vision_attention=4.0 * shape.vision.query_width * pairs,
        head=2.0 * shape.head_parameters * load.scored,
    )


def _window_pairs(shape: ModelShape, grid: tuple[int, int, int]) -> int:
    """Query-key pairs of one windowed vision layer; windows at the lower and right edge are smaller."""
    side = shape.window * shape.merge
    frames, *edges = grid
    rows, columns = ((edge // side) * side**2 + (edge % side) ** 2 for edge in edges)
    return frames * rows * columns


def train_flops(shape: ModelShape, load: Load, mode: Mode = TRAIN_ALL) -> Flops:
    """Operations that forward and backward need: three times the forward pass, less what is frozen. For the MFU."""
    linear = 2.0 if mode.adapters else 3.0
    vision = {"train": linear, "forward": 1.0, "cached": 0.0}[mode.vision]
    vision_attention = {"train": 3.0, "forward": 1.0, "cached": 0.0}[mode.vision]
    return forward_flops(shape, load).times(Flops(linear, 3.0, vision, vision_attention, linear))


def executed_flops(shape: ModelShape, load: Load, mode: Mode = TRAIN_ALL) -> Flops:
    """Operations that are done, for the HFU: also the scores that attention's backward forms again (half a forward),
    the head's logits, which are never kept, and with checkpointing every layer.
    """
    again = 1.0 if mode.checkpointing else 0.0
    seen = mode.vision == "train"
    extra = Flops(again, 0.5 + again, again * seen, (0.5 + again) * seen, 1.0)
    return train_flops(shape, load, mode) + forward_flops(shape, load).times(extra)


def utilization(flops: float, seconds: float, gpu_name: str, gpus: int = 1) -> float | None:
    """MFU of train_flops, HFU of executed_flops; None for a GPU whose peak is not listed."""
    peak = PEAK_TFLOPS.get(gpu_name)
    return None if peak is None else flops / (seconds * gpus * peak * 1e12)


# ---------------------------------------------------------------- seconds


@dataclass(frozen=True)
class Speed:
    """What the parts reach, as shares of the peak, and the seconds that a row costs whatever it holds.

    Fitted to Qwen2.5-VL-3B on one H200 with 1, 2 and 4 groups a row: launches and the tail of the attention kernel's
    backward make the fixed part, so that shares are those of a row that has grown. Predicted forward and backward of
    the 16 groups lay within 21 % of what was measured, eager (5.1, 3.6, 3.0 s) or compiled (2.3 s).
    """

    peak_tflops: float
    text: float = 0.75
    attention: float = 0.14
    vision: float = 0.29
    head: float = 0.72
    row_s: float = 0.12

    @classmethod
    def of(cls, device: torch.device) -> "Speed":
        """Of the device's peak, or a generic one where it is not known."""
        if device.type == "cpu":
            return cls(CPU_TFLOPS, attention=0.5, vision=0.75, row_s=0.01)
        name = torch.get_device_module(device).get_device_name(device)
        return cls(PEAK_TFLOPS.get(name, GENERIC_TFLOPS))

    def seconds(self, flops: Flops) -> float:
        """Of this work without the row's fixed part."""
        vision = (flops.vision + flops.vision_attention) / self.vision
        weighted = flops.text / self.text + flops.attention / self.attention + vision + flops.head / self.head
        return weighted / (self.peak_tflops * 1e12)


def train_seconds(shape: ModelShape, load: Load, speed: Speed, mode: Mode = TRAIN_ALL) -> float:
    """Predicted forward and backward of one row."""
    return speed.row_s + speed.seconds(executed_flops(shape, load, mode))


def forward_seconds(shape: ModelShape, load: Load, speed: Speed) -> float:
    """Predicted forward pass of one row without gradient, 4 % below the measured 0.88 s for 16 groups in 4 rows."""
    return speed.row_s / 3 + speed.seconds(forward_flops(shape, load))


def row_seconds(config: PretrainedConfig, device: torch.device, mode: Mode = TRAIN_ALL) -> Callable[[Load], float]:
    """The `cost` of packing. A family whose shape is not known is counted in tokens: attention and pictures are then
    not seen, and the result is no time."""
    shape, speed = ModelShape.of(config), Speed.of(device)
    if shape is None:
        return lambda load: 1e-6 * load.tokens
    return lambda load: train_seconds(shape, load, speed, mode)


# ---------------------------------------------------------------- bytes


@dataclass(frozen=True)
class RowBytes:
    """Predicted bytes of a row's forward and backward beyond weights, gradients and optimizer states, at their peak.
    head: where the head's chunk is what the peak falls on; 0 where a layer's recomputation is."""

    activations: float
    head: float

    @property
    def total(self) -> float:
        return self.activations + self.head


def row_bytes(shape: ModelShape, load: Load, mode: Mode = TRAIN_ALL, **options: Any) -> float:
    """The sum of `row_parts`, whose options it takes."""
    return row_parts(shape, load, mode, **options).total


def row_parts(
    shape: ModelShape,
    load: Load,
    mode: Mode = TRAIN_ALL,
    *,
    fused: bool = True,
    width: int = 2,
    chunk_tokens: int = 4096,
    head_gradient_width: int = 4,
) -> RowBytes:
    """With `width` bytes a number (2 in bfloat16).

    For the backward pass a layer keeps, per token, 3 vectors of the queries' width, 3.5 hidden ones and 3 of the MLP's
    with `fused` norms and activations (compiled), 3, 8.5 and 4 in eager mode (float32 copies in norms and rotations).
    With checkpointing it keeps its input, and all the rest of one layer at a time. At the head, 5.5 bytes exist for
    each logit of a chunk, and the gradient of its matrix in `head_gradient_width` bytes.
    Fitted to Qwen2.5-VL-3B on one H200, 16 groups of 8 at 1, 2 and 4 groups a row: 33-82 GiB eager, 41-64 GiB fused,
    17-21 GiB with checkpointing, the 14 GiB of weights and gradients included, are met within 4 %; what comes on top
    of these 14 GiB within 4 % without and 16 % with checkpointing.
    """
    patches = sum(t * h * w for t, h, w in load.grids) if mode.vision == "train" else 0
    text = width * load.tokens * _kept_numbers(shape.text, fused)
    if mode.adapters:
        text += ADAPTER_WIDTH * load.tokens * _adapter_inputs(shape.text)
    vision = width * patches * _kept_numbers(shape.vision, fused)
    head = 5.5 * min(load.scored, chunk_tokens) * shape.vocabulary
    if not mode.adapters:
        head += head_gradient_width * shape.head_parameters
    if not mode.checkpointing:
        return RowBytes(shape.text.layers * text + shape.vision.layers * vision, head)
    inputs = load.tokens * shape.text.layers * shape.text.hidden + patches * shape.vision.layers * shape.vision.hidden
    layer = max(text, vision)
    return RowBytes(width * inputs + (0 if head > layer else layer), head if head > layer else 0)


def _kept_numbers(blocks: Blocks, fused: bool) -> float:
    """Numbers that one layer keeps per token for its backward pass."""
    hidden, mlp = (3.5, 3) if fused else (8.5, 4)
    return hidden * blocks.hidden + 3 * blocks.query_width + mlp * blocks.intermediate


def _adapter_inputs(blocks: Blocks) -> int:
    """Numbers per token that the adapters of a layer keep: PEFT casts the input of each of the seven linear layers to
    the adapters' type, each time anew."""
    return 5 * blocks.hidden + blocks.query_width + blocks.intermediate
