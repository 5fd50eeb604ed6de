"""Seeds and token ids."""

from itertools import pairwise

from transformers import AutoConfig, AutoProcessor, GenerationConfig

from grpo_vlm.rollout.types import banned_token_ids, eos_token_ids, request_seed
from tests.tiny import tiny_model


def test_seeds_differ_in_every_part_and_are_never_neighbours():
    seeds = [
        request_seed(run, step, row, purpose)
        for run in (0, 1)
        for step in (1, 2)
        for row in ("a:1", "a:2", "a:11")
        for purpose in ("train", "val")
    ]
    assert all(0 <= seed < 2**63 for seed in seeds)
    ordered = sorted(seeds)
    assert min(high - low for low, high in pairwise(ordered)) > 10_000
    assert request_seed(0, 1, "a:1", "train") == seeds[0]


def test_banned_and_final_ids(tmp_path_factory):
    path = tiny_model("qwen2_5_vl", tmp_path_factory.getbasetemp())
    processor = AutoProcessor.from_pretrained(path)
    banned = banned_token_ids(processor, AutoConfig.from_pretrained(path))
    names = processor.tokenizer.convert_ids_to_tokens(banned)
    expected = {"<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>"}
    assert set(names) == expected
    eos = processor.tokenizer.convert_ids_to_tokens(eos_token_ids(processor, GenerationConfig.from_pretrained(path)))
    assert set(eos) == {"<|im_end|>", "<|endoftext|>"}
