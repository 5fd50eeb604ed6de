"""The engine without a server: samples with the trained model itself, through transformers.

Its own sampling loop, because each completion must depend on its request's seed alone and not on what else is in the
batch: a completion has its own stream of uniform numbers, and a token is found by inverting the cumulative
distribution. Prompts run once; their cache is then repeated for the n completions.

Shape legend: P prompts of a chunk, B = P x n completions, L padded prompt length, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from grpo_vlm.errors import RolloutError
from grpo_vlm.model.packed import base_model, positions_of
from grpo_vlm.rollout.types import Completion, Request, Sampling, banned_token_ids, eos_token_ids

CHUNK_TOKENS = 65536  # prompt and completion tokens that are in the cache at one time
NEGATIVE = float("-inf")


class TransformersEngine:
    """Generates with the live model of the last `sync`: eval mode, cache on, training state restored afterwards.

    Needs the whole model on each rank (plain or DDP). The same requests in the same order give the same bits.
    """

    name = "transformers"

    def __init__(self, *, processor: Any, model: nn.Module, accelerator: Any) -> None:
        self.accelerator = accelerator
        self.model = accelerator.unwrap_model(model)
        self.tokenizer = processor.tokenizer
        self.image_id = self.model.config.image_token_id
        self.video_id = self.model.config.video_token_id
        self.banned_ids = banned_token_ids(processor, self.model.config)
        self.eos_ids = eos_token_ids(processor, self.model.generation_config)
        self.version = -1

    def start(self) -> None:
        """RolloutError when the model is sharded, which this engine cannot generate with."""
        plugin = self.accelerator.state.deepspeed_plugin
        if (plugin is not None and plugin.zero_stage == 3) or self.accelerator.is_fsdp2:
            raise RolloutError(
                "worker.rollout.name=transformers generates with the whole model on each device, but it is sharded "
                "(ZeRO-3 or FSDP). Use worker.rollout.name=vllm, or DDP"
            )

    def sync(self, model: nn.Module, version: int) -> dict[str, float]:
        """Nothing moves: the live weights are used."""
        self.model = self.accelerator.unwrap_model(model)
        self.version = version
        return {}

    def metrics(self) -> dict[str, float]:
        """Nothing can fall."""
        return {}

    def release(self) -> None:
        """Nothing is held between calls."""

    def close(self) -> None:
        """Nothing to stop."""

    def generate(
        self, requests: Sequence[Request], on_progress: Callable[[int], None] | None = None
    ) -> list[list[Completion]]:
        """See Engine."""
        completions: list[list[Completion]] = []
        with torch.no_grad(), evaluating(self.model), self.accelerator.autocast():
            for chunk in chunks(requests):
                completions += self._generate_chunk(chunk)
                if on_progress is not None:
                    on_progress(len(completions))
        return completions

    def _generate_chunk(self, chunk: Sequence[Request]) -> list[list[Completion]]:
        """Requests with the same sampling settings, at one time."""
        sampling, device = chunk[0].sampling, self.accelerator.device
        inputs = self._pad(chunk)
        position_ids = self._positions(chunk, inputs)
        cache = DynamicCache(config=self.model.config.get_text_config())
        logits = self.model(
            **inputs, position_ids=position_ids, past_key_values=cache, use_cache=True, logits_to_keep=1
        ).logits[:, -1]
        cache.batch_repeat_interleave(sampling.n)
        logits = logits.repeat_interleave(sampling.n, 0)
        mask = inputs["attention_mask"].repeat_interleave(sampling.n, 0)
        following = (position_ids.amax((0, 2)) + 1).repeat_interleave(sampling.n, 0)  # [B], the next position
        uniforms = torch.cat([uniform_streams(request) for request in chunk]).to(device)
        ids = torch.zeros(len(uniforms), sampling.max_tokens, dtype=torch.long, device=device)
        logprobs = torch.zeros(ids.shape, device=device)
        lengths = torch.full((len(ids),), sampling.max_tokens, device=device)
        stopped = torch.zeros(len(ids), dtype=torch.bool, device=device)
        seen = self._seen(inputs, logits) if sampling.repetition_penalty != 1 else None
        for step in range(sampling.max_tokens):
            ids[:, step], logprobs[:, step] = draw(logits, uniforms[:, step], sampling, self.banned_ids, seen)
            if seen is not None:
                seen.scatter_(1, ids[:, step : step + 1], True)
            ended = self._ended(ids[:, : step + 1], sampling) & ~stopped
            lengths[ended] = step + 1
            stopped |= ended
            if step + 1 == sampling.max_tokens or bool(stopped.all()):
                break
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
            logits = self.model(
                input_ids=ids[:, step : step + 1],
                attention_mask=mask,
                position_ids=(following + step)[None, :, None].expand(3, -1, 1),
                past_key_values=cache,
                use_cache=True,
            ).logits[:, -1]
        return self._completions(sampling.n, ids, logprobs, lengths.tolist(), stopped.tolist())

    def _seen(self, inputs: dict[str, Tensor], logits: Tensor) -> Tensor:
        """Which tokens each prompt has, bool [B, V]."""
        seen = torch.zeros(len(inputs["input_ids"]), logits.shape[-1], dtype=torch.bool, device=logits.device)
        rows, columns = inputs["attention_mask"].nonzero(as_tuple=True)
        seen[rows, inputs["input_ids"][rows, columns]] = True
        return seen.repeat_interleave(len(logits) // len(seen), 0)

    def _ended(self, ids: Tensor, sampling: Sampling) -> Tensor:
        """Whether the last of the tokens [B, T] so far ends a completion, bool [B]."""
        final = [*([] if sampling.ignore_eos else self.eos_ids), *sampling.stop_token_ids]
        ended = torch.isin(ids[:, -1], torch.tensor(final, dtype=ids.dtype, device=ids.device))
        if sampling.stop:
            tail = ids[:, -max(len(text.encode()) for text in sampling.stop) - 4 :]  # a token has a byte or more
            texts = [self.tokenizer.decode(row, skip_special_tokens=False) for row in tail.tolist()]
            found = [any(text in shown for text in sampling.stop) for shown in texts]
            ended |= torch.tensor(found, device=ids.device)
        return ended

    def _completions(
        self, n: int, ids: Tensor, logprobs: Tensor, lengths: list[int], stopped: list[bool]
    ) -> list[list[Completion]]:
        rows = [
            Completion(
                tuple(row_ids[:length]),
                tuple(row_logprobs[:length]),
                "stop" if stop else "length",
                self.tokenizer.decode(row_ids[:length], skip_special_tokens=False),
                self.version,
            )
            for row_ids, row_logprobs, length, stop in zip(
                ids.tolist(), logprobs.tolist(), lengths, stopped, strict=True
            )
        ]
        return [rows[first : first + n] for first in range(0, len(rows), n)]

    def _pad(self, chunk: Sequence[Request]) -> dict[str, Tensor]:
        """Left-padded prompts [P, L] and the pictures and videos of all of them."""
        device = self.accelerator.device
        length = max(len(request.prompt.token_ids) for request in chunk)
        ids = torch.full((len(chunk), length), self.tokenizer.pad_token_id, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(chunk):
            tokens = torch.tensor(request.prompt.token_ids)
            ids[row, length - len(tokens) :] = tokens
            mask[row, length - len(tokens) :] = 1
        inputs = {
            "input_ids": ids,
            "attention_mask": mask,
            "mm_token_type_ids": ((ids == self.image_id).int() + 2 * (ids == self.video_id).int()) * mask,
        }
        prompts = [request.prompt for request in chunk if request.prompt.pixel_values is not None]
        if prompts:
            inputs["pixel_values"] = torch.cat([prompt.pixel_values for prompt in prompts])
            inputs["image_grid_thw"] = torch.cat([prompt.image_grid_thw for prompt in prompts])
        clips = [clip for request in chunk for clip in request.prompt.videos]
        if clips:
            inputs["pixel_values_videos"] = torch.cat([clip.pixels for clip in clips])
            inputs["video_grid_thw"] = torch.stack([clip.grid for clip in clips])
        return {name: tensor.to(device) for name, tensor in inputs.items()}

    def _positions(self, chunk: Sequence[Request], inputs: dict[str, Tensor]) -> Tensor:
        """Rotary positions [3, P, L]: the trainer's with videos, the model's own rule with pictures, a count of the
        real tokens without."""
        mask = inputs["attention_mask"]
        if "pixel_values_videos" in inputs:
            positions = torch.zeros(3, *mask.shape, dtype=torch.long)
            for row, request in enumerate(chunk):
                own = positions_of(self.model, request.prompt)
                positions[:, row, mask.shape[1] - own.shape[1] :] = own
            return positions.to(mask.device)
        if "pixel_values" not in inputs:
            return (mask.cumsum(-1) - 1).clamp(min=0)[None].expand(3, -1, -1)
        return base_model(self.model).base_model.get_rope_index(
            inputs["input_ids"],
            image_grid_thw=inputs["image_grid_thw"],
            attention_mask=mask,
            mm_token_type_ids=inputs["mm_token_type_ids"],
        )[0]


def draw(
    logits: Tensor,
    uniforms: Tensor,
    sampling: Sampling,
    banned_ids: Sequence[int],
    seen: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Token ids [B] and their log-probs [B] for logits [B, V] and uniform numbers [B] of [0, 1).

    seen: bool [B, V], the tokens that the repetition penalty holds for. Greedy for temperature 0, with the log-probs
    of temperature 1. The order is vLLM's: banned ids, penalty, temperature, min_p, top_k, top_p.
    """
    scores = logits.float()
    scores[:, list(banned_ids)] = NEGATIVE
    if seen is not None:
        penalty = sampling.repetition_penalty
        scores = torch.where(seen, torch.where(scores > 0, scores / penalty, scores * penalty), scores)
    if sampling.temperature > 0:
        scores = keep_likely(scores / sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
    logprobs = scores.log_softmax(-1)
    if sampling.temperature == 0:
        tokens = logprobs.argmax(-1)
    else:
        cumulative = logprobs.double().exp().cumsum(-1)
        tokens = torch.searchsorted(cumulative, (uniforms * cumulative[:, -1])[:, None], right=True)[:, 0]
    return tokens, logprobs.gather(-1, tokens[:, None])[:, 0]


def keep_likely(scores: Tensor, top_k: int, top_p: float, min_p: float = 0.0) -> Tensor:
    """Scores [B, V] with everything at -inf that is less probable than `min_p` times the best, or outside the `top_k`
    best, or outside the smallest set of mass `top_p`."""
    if min_p > 0:
        probs = scores.softmax(-1)
        scores = scores.masked_fill(probs < min_p * probs.amax(-1, keepdim=True), NEGATIVE)
    if 0 < top_k < scores.shape[-1]:
        scores = scores.masked_fill(scores < scores.topk(top_k, -1).values[:, -1:], NEGATIVE)
    if top_p < 1:
        ordered, order = scores.sort(-1, descending=True)
        probs = ordered.softmax(-1)
        outside = (
            probs.cumsum(-1) - probs >= top_p
        )  # the mass before a token is already enough; the best one always stays
        scores = scores.masked_fill(outside.scatter(-1, order, outside), NEGATIVE)
    return scores


def uniform_streams(request: Request) -> Tensor:
    """float64 [n, max_tokens] of [0, 1): one stream per completion, from the request's seed alone."""
    streams = []
    for child in range(request.sampling.n):
        digest = hashlib.blake2b(f"{request.seed}\0{child}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
        streams.append(torch.rand(request.sampling.max_tokens, generator=generator, dtype=torch.float64))
    return torch.stack(streams)


def chunks(requests: Sequence[Request]) -> Iterator[list[Request]]:
    """Consecutive requests with equal sampling settings whose padded tokens stay below CHUNK_TOKENS."""
    chunk: list[Request] = []
    longest = 0
    for request in requests:
        length = max(longest, len(request.prompt.token_ids))
        tokens = (len(chunk) + 1) * request.sampling.n * (length + request.sampling.max_tokens)
        if chunk and (request.sampling != chunk[0].sampling or tokens > CHUNK_TOKENS):
            yield chunk
            chunk, length = [], len(request.prompt.token_ids)
        chunk.append(request)
        longest = length
    if chunk:
        yield chunk


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode for all modules (which also turns gradient checkpointing off), each one's mode restored afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
