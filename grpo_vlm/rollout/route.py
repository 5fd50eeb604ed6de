"""Server side of our own route POST /grpo_vlm/generate: token ids and processed pictures in, token ids and log-probs
out; and of /grpo_vlm/weights, the name of the weights that the server holds, which a trainer asks for (GET) and sets
(POST): a server that was started again meanwhile is noticed before it gets a part of them and before it generates.

Runs inside vLLM's API process as ASGI middleware (auth.RequireKey puts it behind the key) and speaks to the engine
directly. Compared with chat completions nothing is rendered, tokenised, decoded or turned into JSON per token, no
picture is processed a second time, and the pixels of a picture cross to the engine once instead of n times. vLLM is
imported when the first batch comes: this module is also read where it is not installed.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import json
import mmap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from grpo_vlm.rollout.asgi import disconnected, read_body, refuse, reply
from grpo_vlm.rollout.wire import (
    PATH,
    SHARED_TYPE,
    UNSHARED,
    WEIGHTS_LOST,
    WEIGHTS_PATH,
    Answer,
    Batch,
    Failure,
    Media,
    WireRequest,
    decode_batch,
    encode_answer,
    encode_end,
    encode_failure,
    open_shared,
)

PIXEL_KEYS = {"image": "pixel_values", "video": "pixel_values_videos"}
GRID_KEYS = {"image": "image_grid_thw", "video": "video_grid_thw"}
BATCH_NUMBER = itertools.count()
FOLDERS = "those that it was started with"
IDLE_S, UNFINISHED_S = 30.0, 300.0  # how long answers, and a run that sends weights, may keep other runs off


class GenerateRoute:
    """Answers PATH and WEIGHTS_PATH itself and hands every other path on."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self.running = 0  # batches that are being generated
        self.weights: str | None = None  # name of those that a trainer has sent; None: those of the model's folder
        self.run: str | None = None  # which run has set the name
        self.unfinished_until = 0.0  # while it sends weights
        self.adding = asyncio.Lock()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"] not in (PATH, WEIGHTS_PATH):
            await self.app(scope, receive, send)
            return
        if scope["path"] == WEIGHTS_PATH:
            await self._weights(scope, receive, send)
            return
        if scope["method"] != "POST":
            await refuse(send, 405, f"{scope['path']} takes POST")
            return
        if (prompts := await self._add(scope, receive, send)) is None:
            return
        try:
            await stream(scope["app"].state.engine_client, prompts, receive, send)
        finally:
            self.running -= 1

    async def _weights(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer with the name that was held, after taking over the body's `weights`: where the body's `held`, if it
        has one, is right, and no answers are being made."""
        if scope["method"] != "POST":
            lora = scope["app"].state.engine_client.vllm_config.lora_config
            await reply(send, 200, {"held": self.weights, "adapters": lora is not None})
            return
        body = json.loads(await read_body(dict(scope["headers"]), receive))
        deadline = time.monotonic() + IDLE_S
        while (occupied := self._occupied(body.get("run"))) or self.adding.locked():
            if time.monotonic() > deadline:
                await refuse(send, 409, occupied or "the server still takes prompts of another call")
                return
            await asyncio.sleep(0.02)
        held = self.weights
        if body.get("held", held) != held:
            await refuse(send, WEIGHTS_LOST, self._others(body["held"]))
            return
        self.weights, self.run = body["weights"], body.get("run")
        self.unfinished_until = time.monotonic() + UNFINISHED_S if body.get("unfinished") else 0.0
        await reply(send, 200, {"held": held})

    def _others(self, wanted: str) -> str:
        return f"the server holds other weights than {wanted}: {self.weights or FOLDERS}"

    def _occupied(self, run: str | None) -> str | None:
        """Why `run` may not change the weights now."""
        if self.running:
            return f"the server still makes answers with {self.weights or FOLDERS}: it serves one run at a time"
        if run != self.run and time.monotonic() < self.unfinished_until:
            return "another run is sending its weights to this server, which serves one run at a time"
        return None

    async def _add(self, scope: Any, receive: Any, send: Any) -> list[Running] | None:
        """Read the batch and add it to the engine; None when it was refused. Its pixels are held no longer."""
        from vllm.v1.engine.exceptions import EngineDeadError

        state, headers = scope["app"].state, dict(scope["headers"])
        body: bytearray | mmap.mmap = await read_body(headers, receive)
        if headers.get(b"content-type", b"").decode() == SHARED_TYPE:
            try:
                body = open_shared(body)
            except (OSError, ValueError, KeyError, TypeError) as error:
                await refuse(send, UNSHARED, f"the client's memory cannot be read: {error}")
                return None
        try:
            batch = decode_batch(body)
        except (ValueError, KeyError, TypeError) as error:
            await refuse(send, 400, f"the batch cannot be read: {error}")
            return None
        adapters = state.openai_serving_models.lora_requests
        if batch.adapter is not None and batch.adapter not in adapters:
            await refuse(send, 409, f"there is no adapter {batch.adapter!r}; loaded: {', '.join(adapters) or 'none'}")
            return None
        try:
            async with self.adding:
                if batch.weights is not None and batch.weights != self.weights:
                    await refuse(send, WEIGHTS_LOST, self._others(batch.weights))
                    return None
                if await state.engine_client.is_paused():
                    await refuse(send, 409, "the engine sleeps or is paused")
                    return None
                hold = batch.hold and self.running == 0
                lora = loaded(adapters.get(batch.adapter))
                prompts = await add_batch(state.engine_client, batch, lora, hold)
                self.running += 1
                return prompts
        except EngineDeadError:
            await refuse(send, 503, "the engine is dead")
            return None


def loaded(lora: Any) -> Any:
    """An adapter of the server's list as a request may name it: it is in the engine, and its files may be gone."""
    import msgspec

    return None if lora is None else msgspec.structs.replace(lora, load_inplace=False)


@dataclass
class Running:
    """A prompt in the engine. ids and queues: one per completion. failure: why it has none."""

    index: int
    ids: list[str]
    queues: list[Any]
    failure: Failure | None = None


async def add_batch(engine: Any, batch: Batch, lora: Any, hold: bool) -> list[Running]:
    """Put every prompt into the engine, in order. With `hold` no step runs before all of them are in."""
    if hold:
        await engine.pause_generation(mode="keep", clear_cache=False)
    try:
        adder = Adder(engine, batch, lora, await engine.get_supported_tasks())
        return [await adder.add(request) for request in batch.requests]
    finally:
        if hold:
            await engine.resume_generation()


class Adder:
    """Turns the prompts of one batch into requests of the engine."""

    def __init__(self, engine: Any, batch: Batch, lora: Any, tasks: Any) -> None:
        self.engine, self.media, self.lora, self.tasks = engine, batch.media, lora, tasks
        self.name = f"grpo-{next(BATCH_NUMBER)}"
        self.engines = itertools.cycle(range(engine.vllm_config.parallel_config.data_parallel_size))
        self.items: dict[int, Any] = {}
        config = engine.model_config.hf_config
        self.vision = Vision(
            {"image": config.image_token_id, "video": config.video_token_id},
            config.vision_config.spatial_merge_size,
            3 * config.vision_config.temporal_patch_size * config.vision_config.patch_size**2,
            # Qwen3-VL writes a time stamp before each frame; its positions are counted from <|vision_start|>.
            framed_videos=config.model_type.startswith("qwen3"),
            timed_videos=config.model_type == "qwen2_5_vl",
        )

    async def add(self, request: WireRequest) -> Running:
        """One engine request per completion: child i has seed + i, as vLLM's own n > 1 has. All go to the same engine
        of a data-parallel server, which then computes the prompt once."""
        from vllm.exceptions import VLLMValidationError

        running = Running(request.index, [], [])
        where = {"lora_request": self.lora, "data_parallel_rank": next(self.engines)}
        try:
            params = sampling_params(**request.sampling)
            count, params.n = params.n, 1
            token_ids = request.token_ids.tolist()
            media = [self.media[number] for number in request.media]
            places = place_media(request.token_ids, media, self.vision)
            items = [self._item(number) for number in request.media]
            # Whatever vLLM refuses must be refused before the picture counts as known to the engine.
            self.engine.input_processor.process_inputs(
                "check",
                self._input(token_ids, media, places, items),
                params,
                supported_tasks=self.tasks,
                **where,
            )
            for child in range(count):
                child_params = copy.copy(params)
                child_params.seed = (params.seed + child) % 2**63
                known = cached(self.engine.renderer.mm_processor_cache, media, items)
                prompt = self._input(token_ids, media, places, known)
                running.ids.append(f"{self.name}-{request.index}-{child}")
                running.queues.append(await self.engine.add_request(running.ids[-1], prompt, child_params, **where))
        except (ValueError, TypeError, VLLMValidationError) as error:
            running.failure = Failure(request.index, 400, str(error))
        return running

    def _input(self, token_ids: list[int], media: list[Media], places: list[Any], items: list[Any]) -> Any:
        from vllm.inputs import mm_input, tokens_input
        from vllm.multimodal.inputs import MultiModalKwargsItems

        if not media:
            return tokens_input(token_ids)
        kinds = dict.fromkeys(item.kind for item in media)
        by_kind = {kind: [i for i, item in enumerate(media) if item.kind == kind] for kind in kinds}
        return mm_input(
            token_ids,
            MultiModalKwargsItems({kind: [items[i] for i in rows] for kind, rows in by_kind.items()}),
            {kind: [media[i].key for i in rows] for kind, rows in by_kind.items()},
            {kind: [places[i] for i in rows] for kind, rows in by_kind.items()},
        )

    def _item(self, number: int) -> Any:
        """vLLM's form of a picture, made once per batch: the model's own processor says how its tensors are cut."""
        from vllm.multimodal.inputs import MultiModalKwargsItems

        if number not in self.items:
            media = self.media[number]
            tensors = {
                PIXEL_KEYS[media.kind]: media.pixels.to(self.engine.model_config.dtype),
                GRID_KEYS[media.kind]: torch.tensor([media.grid]),
            }
            if media.seconds_per_grid is not None and self.vision.timed_videos:
                tensors["second_per_grid_ts"] = torch.tensor([media.seconds_per_grid])
            fields = self.engine.renderer.get_mm_processor()._get_mm_fields_config(tensors, {})
            (self.items[number],) = MultiModalKwargsItems.from_hf_inputs(tensors, fields)[media.kind]
        return self.items[number]


def sampling_params(
    *, banned_ids: Sequence[int], stop: Sequence[str], stop_token_ids: Sequence[int], **settings: Any
) -> Any:
    """vLLM's parameters for log-probs of the sampled tokens alone, without text. Banned ids get probability 0."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        **settings,
        stop=list(stop),
        stop_token_ids=list(stop_token_ids),
        include_stop_str_in_output=True,
        logit_bias={token: float("-inf") for token in banned_ids} or None,
        logprobs=0,
        flat_logprobs=True,
        detokenize=bool(stop),  # only stop strings need the text
        skip_special_tokens=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )


@dataclass(frozen=True)
class Vision:
    """How the model takes media: placeholder id by kind, patches merged along a side, numbers of a patch, whether a
    video's frames have time stamps between them, whether positions count its seconds."""

    token_ids: dict[str, int]
    merge_size: int
    patch_dim: int
    framed_videos: bool
    timed_videos: bool = False


def place_media(token_ids: np.ndarray, media: Sequence[Media], vision: Vision) -> list[Any]:
    """A PlaceholderRange for each item: the next placeholders of its kind. ValueError when numbers do not match."""
    from vllm.multimodal.inputs import PlaceholderRange

    positions = {kind: np.flatnonzero(token_ids == token) for kind, token in vision.token_ids.items()}
    used = dict.fromkeys(positions, 0)
    places = []
    for item in media:
        count = int(np.prod(item.grid)) // vision.merge_size**2
        taken = positions[item.kind][used[item.kind] : used[item.kind] + count]
        used[item.kind] += count
        wanted = (int(np.prod(item.grid)), vision.patch_dim)
        if len(taken) < count or count == 0 or item.pixels.shape != wanted:
            raise ValueError(
                f"{item.kind} {len(places)} has the patch grid {item.grid}, pixels {tuple(item.pixels.shape)} and "
                f"{len(taken)} placeholders in the prompt; the grid asks for {wanted} and {count}"
            )
        first, last = int(taken[0]), int(taken[-1])
        if item.kind == "video" and vision.framed_videos:
            first, last = first - 1, last + 1  # <|vision_start|> ... <|vision_end|>
            mask = torch.from_numpy(token_ids[first : last + 1] == vision.token_ids["video"])
            places.append(PlaceholderRange(first, last - first + 1, mask))
        elif last - first + 1 != count:
            raise ValueError(f"the placeholders of {item.kind} {len(places)} are not next to each other")
        else:
            places.append(PlaceholderRange(first, count))
    left = {kind: len(positions[kind]) - used[kind] for kind in positions}
    if any(left.values()):
        raise ValueError(f"the prompt has more placeholders than its media fill: {left}")
    return places


def cached(cache: Any, media: Sequence[Media], items: Sequence[Any]) -> list[Any]:
    """The items as they must be sent to the engine: None for one that its cache has. Follows each request that is
    added, so that vLLM's two caches (API process, engine) drop the same items."""
    if cache is None:
        return list(items)
    for item in media:
        cache.touch_sender_cache_item(item.key)
    return [cache.get_and_update_item((item, []), entry.key)[0] for item, entry in zip(items, media, strict=True)]


async def stream(engine: Any, prompts: Sequence[Running], receive: Any, send: Any) -> None:
    """Send a frame for each prompt as soon as it is finished; abort what runs when the client goes away."""
    await send(
        {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/octet-stream")]}
    )
    gone = asyncio.create_task(disconnected(receive))
    tasks = [asyncio.create_task(finish(prompt)) for prompt in prompts]
    waiting = set(tasks)
    try:
        while waiting and not gone.done():
            done, _ = await asyncio.wait({*waiting, gone}, return_when=asyncio.FIRST_COMPLETED)
            for task in [task for task in tasks if task in done]:
                await send({"type": "http.response.body", "body": task.result(), "more_body": True})
            waiting -= done
        if not gone.done():
            await send({"type": "http.response.body", "body": encode_end()})
    finally:
        gone.cancel()
        for task in tasks:
            task.cancel()
        left = [prompt for prompt, task in zip(prompts, tasks, strict=True) if task in waiting or prompt.failure]
        if left:
            await engine.abort([name for prompt in left for name in prompt.ids])


async def finish(prompt: Running) -> bytes:
    """The frame of one prompt, when all of its completions are there."""
    from vllm.v1.engine.exceptions import EngineDeadError

    if prompt.failure is not None:
        return encode_failure(prompt.failure)
    try:
        outputs = [await last_output(queue) for queue in prompt.queues]
    except EngineDeadError:
        prompt.failure = Failure(prompt.index, 503, "the engine died")
    except Exception as error:  # a fault of one request must not take the others' answers with it
        prompt.failure = Failure(prompt.index, 500, f"{type(error).__name__}: {error}")
    if prompt.failure is not None:
        return encode_failure(prompt.failure)
    completions = [output.outputs[0] for output in outputs]
    reasons = [completion.finish_reason for completion in completions]
    if not set(reasons) <= {"stop", "length"}:
        return encode_failure(Failure(prompt.index, 503, f"the engine ended the completions with {reasons}"))
    return encode_answer(
        Answer(
            prompt.index,
            np.asarray(outputs[0].prompt_token_ids, np.int32),
            [np.asarray(completion.token_ids, np.int32) for completion in completions],
            [np.asarray(completion.logprobs.logprobs, np.float32) for completion in completions],
            reasons,
        )
    )


async def last_output(queue: Any) -> Any:
    """The finished output of one engine request."""
    output = await queue.get()
    while not output.finished:
        output = await queue.get()
    return output
