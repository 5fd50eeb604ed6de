"""Tiny Qwen2.5-VL and Qwen3-VL checkpoints with a real byte-pair tokenizer, built offline in a second or two.

The tokenizer is the head of Qwen's own rank file out of the PyPI package dashscope; weights are random with a fixed
seed.
"""

import tempfile
from functools import cache
from pathlib import Path

import torch
from transformers import (
    GenerationConfig,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2Tokenizer,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

from grpo_vlm.demo.build import build_tokenizer

RANKS = 3000
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}"
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' or 'image' in part or 'image_url' in part %}"
    "<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part['type'] == 'video' or 'video' in part %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif 'text' in part %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_model(kind: str, root: str | Path) -> Path:
    """Folder root/tiny-KIND with a loadable model, processor and generation config; reused when it is there.

    kind: "qwen2_5_vl" (patch 14, 28 pixels a token side) or "qwen3_vl" (patch 16, 32 pixels).
    """
    folder = Path(root) / f"tiny-{kind}"
    if (folder / "config.json").is_file():
        return folder
    build = {"qwen2_5_vl": _qwen2_5_vl, "qwen3_vl": _qwen3_vl}[kind]
    state = torch.get_rng_state()
    torch.manual_seed(0)
    model, processor = build(tokenizer())
    torch.set_rng_state(state)
    end, pad = processor.tokenizer.eos_token_id, processor.tokenizer.pad_token_id
    model.generation_config = GenerationConfig(
        bos_token_id=pad, pad_token_id=pad, eos_token_id=[end, pad], do_sample=True, temperature=1.0
    )
    unfinished = Path(tempfile.mkdtemp(prefix="tiny-", dir=root))  # renamed when whole: other processes may look on
    processor.save_pretrained(unfinished)
    model.save_pretrained(unfinished)
    if not folder.exists():
        unfinished.rename(folder)
    return folder


@cache
def tokenizer() -> Qwen2Tokenizer:
    """Qwen's tokenizer cut to its first RANKS byte pairs, with its special tokens in their order."""
    return build_tokenizer(RANKS, CHAT_TEMPLATE)


def _shared(qwen: Qwen2Tokenizer) -> tuple[dict, dict]:
    """Text sizes and token ids that both models have."""
    ids = {
        "image_token_id": qwen.convert_tokens_to_ids("<|image_pad|>"),
        "video_token_id": qwen.convert_tokens_to_ids("<|video_pad|>"),
        "vision_start_token_id": qwen.convert_tokens_to_ids("<|vision_start|>"),
        "vision_end_token_id": qwen.convert_tokens_to_ids("<|vision_end|>"),
    }
    text = {
        "vocab_size": -(-len(qwen) // 64) * 64,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "initializer_range": 0.1,
        "bos_token_id": qwen.pad_token_id,
        "eos_token_id": qwen.eos_token_id,
        "pad_token_id": qwen.pad_token_id,
    }
    return text, ids


def _vision(**own: object) -> dict:
    sizes = {"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "out_hidden_size": 128}
    return sizes | {"initializer_range": 0.1} | own


def _qwen2_5_vl(qwen: Qwen2Tokenizer) -> tuple[Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLProcessor]:
    text, ids = _shared(qwen)
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 6, 6]}
    config = Qwen2_5_VLConfig(
        text_config=text | {"max_window_layers": 2, "use_sliding_window": False, "rope_parameters": rope},
        vision_config=_vision(
            fullatt_block_indexes=[1], window_size=112, patch_size=14, spatial_merge_size=2, tokens_per_second=2
        ),
        tie_word_embeddings=True,
        architectures=["Qwen2_5_VLForConditionalGeneration"],
        dtype="float32",
        **ids,
    )
    size = {"shortest_edge": 28 * 28 * 4, "longest_edge": 28 * 28 * 64}
    processor = Qwen2_5_VLProcessor(
        Qwen2VLImageProcessor(size=size, patch_size=14),
        qwen,
        Qwen2VLVideoProcessor(size=size, patch_size=14),
        chat_template=CHAT_TEMPLATE,
    )
    return Qwen2_5_VLForConditionalGeneration(config), processor


def _qwen3_vl(qwen: Qwen2Tokenizer) -> tuple[Qwen3VLForConditionalGeneration, Qwen3VLProcessor]:
    text, ids = _shared(qwen)
    rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [4, 6, 6], "mrope_interleaved": True}
    config = Qwen3VLConfig(
        text_config=text | {"head_dim": 32, "rope_parameters": rope},
        vision_config=_vision(num_position_embeddings=256, deepstack_visual_indexes=[0], patch_size=16),
        tie_word_embeddings=True,
        architectures=["Qwen3VLForConditionalGeneration"],
        dtype="float32",
        **ids,
    )
    size = {"shortest_edge": 32 * 32 * 4, "longest_edge": 32 * 32 * 64}
    half = [0.5, 0.5, 0.5]
    processor = Qwen3VLProcessor(
        Qwen2VLImageProcessor(size=size, patch_size=16, image_mean=half, image_std=half),
        qwen,
        Qwen3VLVideoProcessor(size=size),
        chat_template=CHAT_TEMPLATE,
    )
    return Qwen3VLForConditionalGeneration(config), processor
