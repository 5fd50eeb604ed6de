"""What goes into a rollout engine and what comes out: plain frozen dataclasses, request seeds, banned and final token
ids.

Both engines (vLLM server, embedded transformers) and the trainer use the same ids: a token that the sampler may not
draw must also be masked by the trainer before log_softmax, or the log-probs of the two differ by 5e-4.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grpo_vlm.data.rows import Prompt

BANNED_TOKENS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>")
BANNED_CONFIG_KEYS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")


@dataclass(frozen=True)
class Sampling:
    """How completions are drawn.

    temperature: 0 is greedy. top_p 1.0, top_k -1 (or 0) and min_p 0.0 switch these filters off; min_p is the least
    probability relative to the likeliest token's. repetition_penalty: above 1 makes tokens of the prompt and the
    completion less likely. stop: strings that end a completion and are kept in it. stop_token_ids: ids that do so, on
    top of the model's own end tokens, which `ignore_eos` disregards.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int = 512
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Request:
    """One unique prompt and how to answer it: `sampling.n` completions, reproducible from `seed` (63 bits)."""

    prompt: Prompt
    sampling: Sampling
    seed: int


@dataclass(frozen=True)
class Completion:
    """One answer.

    token_ids: ids as sampled, with the final end-of-sequence id when `finish_reason` is "stop".
    logprobs: one per token, of the distribution that was really sampled (temperature, filters, banned ids removed).
    finish_reason: "stop" (the model ended) or "length" (`max_tokens` or the context ran out).
    text: the decoded ids, special tokens kept.
    version: number of the weights that made it (the last `Engine.sync`).
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    text: str
    version: int


def request_seed(run_seed: int, step: int, row_id: str, purpose: str) -> int:
    """63-bit seed of one request. Hashed, never consecutive: vLLM gives child i of a request seed + i, so neighbours
    would share answers.

    `purpose` keeps streams of one row apart, e.g. "train", "val", "val-greedy".
    """
    key = f"{run_seed}\0{step}\0{row_id}\0{purpose}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 1


def banned_token_ids(processor: Any, config: Any) -> list[int]:
    """Sorted ids that no completion may contain: placeholders of images and videos, which the model could not read
    back.

    `processor` is a processor or a tokenizer, `config` the model's transformers config.
    """
    tokenizer = tokenizer_of(processor)
    known = tokenizer.get_vocab()
    ids = {known[token] for token in BANNED_TOKENS if token in known}
    values = config.to_dict()
    ids |= {values[key] for key in BANNED_CONFIG_KEYS if values.get(key) is not None}
    return sorted(ids)


def eos_token_ids(processor: Any, generation_config: Any | None) -> list[int]:
    """Sorted ids that end a completion: those of the model's generation config, and the tokenizer's own."""
    ids: set[int] = set()
    for value in (
        generation_config.eos_token_id if generation_config is not None else None,
        tokenizer_of(processor).eos_token_id,
    ):
        if value is not None:
            ids |= set(value) if isinstance(value, (list, tuple)) else {value}
    return sorted(ids)


def tokenizer_of(processor: Any) -> Any:
    """The tokenizer inside a multimodal processor, or the tokenizer itself."""
    from transformers import ProcessorMixin

    return processor.tokenizer if isinstance(processor, ProcessorMixin) else processor
