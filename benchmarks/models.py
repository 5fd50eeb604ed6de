"""Models of real shapes with random weights, made without a network: for speed and memory, never for accuracy.

python benchmarks/models.py 3b FOLDER      writes model, processor and tokenizer
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import torch
from tokenizers import AddedToken
from transformers import (
    GenerationConfig,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2Tokenizer,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.workload import DEMO_MODEL, TOKEN_SIDE, VOCABULARY
from grpo_vlm.demo.build import CHAT_TEMPLATE, SPECIAL_TOKENS

ORDINARY = 151643  # ids below Qwen's special ones

_VISION = {
    "depth": 32,
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "num_heads": 16,
    "fullatt_block_indexes": [7, 15, 23, 31],
}
SHAPES: dict[str, dict[str, dict]] = {  # Qwen2.5-VL's, and a small one that keeps the real head sizes and vocabulary
    "3b": {
        "text": {
            "hidden_size": 2048,
            "num_hidden_layers": 36,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "intermediate_size": 11008,
            "tie_word_embeddings": True,
        },
        "vision": _VISION,
    },
    "7b": {
        "text": {
            "hidden_size": 3584,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "intermediate_size": 18944,
            "tie_word_embeddings": False,
        },
        "vision": _VISION,
    },
    "tiny": {
        "text": {
            "hidden_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "intermediate_size": 512,
            "tie_word_embeddings": True,
        },
        "vision": {
            "depth": 4,
            "hidden_size": 160,
            "intermediate_size": 212,  # no multiple of 8, like the real 3420
            "num_heads": 2,
            "fullatt_block_indexes": [1, 3],
        },
    },
}


def write_model(name: str, folder: Path, device: str, *, seed: int = 0) -> None:
    """Qwen2.5-VL of a shape in SHAPES with random bf16 weights, its processor, and a tokenizer with the real ids of
    the special tokens. Written beside and renamed: a folder that is there is whole."""
    model, processor = build_model(name, device, seed=seed), build_processor()
    unfinished = Path(tempfile.mkdtemp(prefix=folder.name, dir=folder.parent))
    processor.save_pretrained(unfinished)
    model.save_pretrained(unfinished, max_shard_size="4GB")
    unfinished.rename(folder)


def build_model(
    name: str, device: str, *, dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> Qwen2_5_VLForConditionalGeneration:
    """The model of `write_model`, made where it will run: a billion random numbers take a CPU minutes."""
    torch.manual_seed(seed)
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = Qwen2_5_VLForConditionalGeneration(model_config(name))
    finally:
        torch.set_default_dtype(torch.float32)
    model.tie_weights()
    pad, end = ORDINARY, ORDINARY + 2
    model.generation_config = GenerationConfig(bos_token_id=pad, pad_token_id=pad, eos_token_id=[end, pad])
    return model


def model_config(name: str) -> Qwen2_5_VLConfig:
    """transformers' configuration of a shape in SHAPES."""
    text, vision = SHAPES[name]["text"], SHAPES[name]["vision"]
    ids = {token: ORDINARY + place for place, token in enumerate(SPECIAL_TOKENS)}
    return Qwen2_5_VLConfig(
        text_config={
            **text,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": 128000,
            "max_window_layers": text["num_hidden_layers"],
            "use_sliding_window": False,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
            "bos_token_id": ids["<|endoftext|>"],
            "eos_token_id": ids["<|im_end|>"],
            "pad_token_id": ids["<|endoftext|>"],
        },
        vision_config={
            **vision,
            "out_hidden_size": text["hidden_size"],
            "in_channels": 3,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "window_size": 112,
            "tokens_per_second": 2,
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=text["tie_word_embeddings"],
        architectures=["Qwen2_5_VLForConditionalGeneration"],
    )


def build_processor() -> Qwen2_5_VLProcessor:
    """Qwen2.5-VL's processor with its real pixel limits."""
    size = {"shortest_edge": 4 * TOKEN_SIDE**2, "longest_edge": 16384 * TOKEN_SIDE**2}
    return Qwen2_5_VLProcessor(
        Qwen2VLImageProcessor(size=size, patch_size=14),
        build_tokenizer(),
        Qwen2VLVideoProcessor(size=size, patch_size=14),
        chat_template=CHAT_TEMPLATE,
    )


def build_tokenizer() -> Qwen2Tokenizer:
    """The demo's byte pairs, which are the first of Qwen's, then words that no text contains up to the real number of
    ids, then Qwen's special tokens under their real ids."""
    saved = json.loads((DEMO_MODEL / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = {word: place for word, place in saved["model"]["vocab"].items() if word not in SPECIAL_TOKENS}
    vocabulary |= {f"Ġword{place}": place for place in range(len(vocabulary), ORDINARY)}
    vocabulary |= {token: ORDINARY + place for place, token in enumerate(SPECIAL_TOKENS)}
    tokenizer = Qwen2Tokenizer(
        vocab=vocabulary,
        merges=[tuple(pair) for pair in saved["model"]["merges"]],
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token=None,
        model_max_length=131072,
    )
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def main() -> None:
    """Writes a model."""
    parser = argparse.ArgumentParser(description="Write a Qwen2.5-VL of real shape with random weights.")
    parser.add_argument("name", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cuda" if torch.accelerator.is_available() else "cpu")
    options = parser.parse_args()
    write_model(options.name, options.folder, options.device)
    size_gb = sum(file.stat().st_size for file in options.folder.rglob("*") if file.is_file()) / 1e9
    print(f"{options.folder}: random {options.name}, {size_gb:.1f} GB", flush=True)


if __name__ == "__main__":
    main()
