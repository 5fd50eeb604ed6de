"""Our route in a real CPU server: what it computes with, what it refuses, what gets into the log."""

import asyncio
import json
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import requests as http
import torch
from transformers import AutoModelForImageTextToText

from grpo_vlm.errors import RolloutError
from grpo_vlm.model.packed import prompt_positions
from grpo_vlm.rollout import route as route_module
from grpo_vlm.rollout import versions
from grpo_vlm.rollout.auth import RequireKey
from grpo_vlm.rollout.client import VLLMClient
from grpo_vlm.rollout.command import ServerSettings
from grpo_vlm.rollout.failures import RequestRefused, ServerGone
from grpo_vlm.rollout.route import Vision, add_batch, cached, place_media
from grpo_vlm.rollout.server import VLLMServer
from grpo_vlm.rollout.types import Request, Sampling, banned_token_ids
from grpo_vlm.rollout.wire import PATH, SHARED_TYPE, WEIGHTS_PATH, Batch, Media, WireRequest
from tests.rollout.helpers import prompts, requests
from tests.tiny import tiny_model

BOUND = 2e-5
IMAGE, VIDEO, START, END = 90, 91, 92, 93
VISION = Vision({"image": IMAGE, "video": VIDEO}, merge_size=2, patch_dim=6, framed_videos=False)


@pytest.fixture(scope="module")
def engine(vllm_engine):
    engine = vllm_engine("qwen2_5_vl")
    engine.sync(load(engine), 0)
    return engine


def load(engine):
    return AutoModelForImageTextToText.from_pretrained(engine.settings.model_path, dtype=torch.float32)


def media(kind="image", grid=(1, 2, 4)):
    return Media("k", kind, torch.zeros(int(np.prod(grid)), 6), grid)


def ids(*values):
    return np.array(values, np.int32)


# --- whose weights the server holds ---


def ask(route, body=None):
    """Status and JSON of one request to WEIGHTS_PATH."""
    sent = []

    async def receive():
        return {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}

    async def send(message):
        sent.append(message)

    engine = SimpleNamespace(vllm_config=SimpleNamespace(lora_config=None))
    headers = [(b"content-length", str(len(json.dumps(body))).encode())]
    scope = {"type": "http", "path": WEIGHTS_PATH, "method": "GET" if body is None else "POST", "headers": headers}
    app = SimpleNamespace(state=SimpleNamespace(engine_client=engine))
    asyncio.run(route(scope | {"app": app}, receive, send))
    return sent[0]["status"], json.loads(sent[1]["body"])


def test_one_run_at_a_time_names_the_weights(monkeypatch):
    monkeypatch.setattr(route_module, "IDLE_S", 0.1)
    route = route_module.GenerateRoute(None)
    assert ask(route) == (200, {"held": None, "adapters": False})
    assert ask(route, {"weights": "half of a", "run": "a", "unfinished": True}) == (200, {"held": None})
    status, answer = ask(route, {"weights": "half of b", "run": "b", "unfinished": True})
    assert status == 409 and "another run is sending its weights" in answer["error"]["message"]
    assert ask(route, {"weights": "a", "run": "a", "held": "other"})[0] == 412
    assert ask(route, {"weights": "a", "run": "a", "held": "half of a"}) == (200, {"held": "half of a"})
    route.running = 1
    status, answer = ask(route, {"weights": "half of b", "run": "b", "unfinished": True})
    assert status == 409 and "still makes answers with a: it serves one run" in answer["error"]["message"]
    route.running = 0
    assert ask(route, {"weights": "half of b", "run": "b", "unfinished": True}) == (200, {"held": "a"})
    route.unfinished_until = 0.0  # b is gone
    assert ask(route, {"weights": "a", "run": "a"})[0] == 200


# --- where media stand in the prompt ---


def test_media_take_the_placeholders_of_their_kind_in_order():
    tokens = ids(1, IMAGE, IMAGE, 2, IMAGE, VIDEO, VIDEO, 3)
    places = place_media(tokens, [media(), media(grid=(1, 2, 2)), media("video", (2, 2, 2))], VISION)
    assert [(place.offset, place.length) for place in places] == [(1, 2), (4, 1), (5, 2)]


def test_a_video_with_time_stamps_covers_its_frames():
    vision = Vision(VISION.token_ids, 2, 6, framed_videos=True)
    tokens = ids(1, 50, START, VIDEO, VIDEO, END, 51, START, VIDEO, VIDEO, END, 2)
    (place,) = place_media(tokens, [media("video", (2, 2, 4))], vision)
    assert (place.offset, place.length) == (2, 9)
    assert place.is_embed.tolist() == [value == VIDEO for value in tokens[2:11]]


@pytest.mark.parametrize(
    ("tokens", "items", "message"),
    [
        ((1, IMAGE, 2), [media()], "1 placeholders in the prompt; the grid asks for .* and 2"),
        ((1, IMAGE, IMAGE, IMAGE, 2), [media()], "more placeholders than its media fill: {'image': 1"),
        ((1, IMAGE, 5, IMAGE), [media()], "not next to each other"),
        ((1, VIDEO, VIDEO), [media()], "0 placeholders"),
        ((IMAGE, IMAGE), [Media("k", "image", torch.zeros(8, 5), (1, 2, 4))], r"pixels \(8, 5\) .* \(8, 6\)"),
        ((IMAGE, IMAGE), [Media("k", "image", torch.zeros(4, 6), (1, 2, 4))], r"pixels \(4, 6\) .* \(8, 6\)"),
        ((1, 2), [Media("k", "image", torch.zeros(1, 6), (1, 1, 1))], "asks for .* and 0"),
    ],
)
def test_media_that_do_not_fit_their_placeholders_are_refused(tokens, items, message):
    with pytest.raises(ValueError, match=message):
        place_media(ids(*tokens), items, VISION)


def test_the_engine_always_has_a_picture_that_is_not_sent_again():
    """vLLM's own two caches, so small that they drop pictures all the time."""
    from vllm.multimodal import cache as caches
    from vllm.multimodal.inputs import (
        MultiModalBatchedField,
        MultiModalFeatureSpec,
        MultiModalFieldElem,
        MultiModalKwargsItem,
        PlaceholderRange,
    )

    config = SimpleNamespace(get_multimodal_config=lambda: SimpleNamespace(mm_processor_cache_gb=1e-6))
    if versions.installed() < (0, 31):
        sender, receiver = caches.MultiModalProcessorSenderCache(config), caches.MultiModalReceiverCache(config)
    else:
        sender, receiver = caches.LruKeyReplicatedSenderCache(config), caches.LruKeyReplicatedReceiverCache(config)
    items = {
        str(key): MultiModalKwargsItem(
            {"pixels": MultiModalFieldElem(torch.full((20 + 13 * key,), float(key)), MultiModalBatchedField())}
        )
        for key in range(8)
    }
    draw, sent = np.random.default_rng(0), 0
    for _ in range(300):
        shown = [SimpleNamespace(key=str(key)) for key in draw.choice(8, draw.integers(1, 4))]
        given = cached(sender, shown, [items[each.key] for each in shown])
        sent += sum(item is not None for item in given)
        features = [
            MultiModalFeatureSpec(item, "image", each.key, PlaceholderRange(0, 1), each.key)
            for item, each in zip(given, shown, strict=True)
        ]
        for feature, each in zip(receiver.get_and_update_features(features), shown, strict=True):
            assert float(feature.data["pixels"].data[0]) == float(each.key)
    assert 8 < sent < 500, sent  # it did drop some, and did spare some


# --- how a batch is added ---


class RecordingEngine:
    """What add_batch asks of an engine, written down; the second of three prompts finds it dead if `dies`."""

    def __init__(self, dies):
        self.calls, self.dies = [], dies
        self.renderer = SimpleNamespace(mm_processor_cache=None)
        self.input_processor = SimpleNamespace(process_inputs=lambda *args, **kwargs: None)
        vision = SimpleNamespace(spatial_merge_size=2, temporal_patch_size=2, patch_size=1)
        config = SimpleNamespace(image_token_id=IMAGE, video_token_id=VIDEO, vision_config=vision, model_type="m")
        self.model_config = SimpleNamespace(hf_config=config)
        self.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_size=2))

    async def pause_generation(self, mode, clear_cache):
        self.calls.append(f"pause {mode} {clear_cache}")

    async def resume_generation(self):
        self.calls.append("resume")

    async def get_supported_tasks(self):
        return ("generate",)

    async def add_request(self, name, prompt, params, lora_request, data_parallel_rank):
        from vllm.v1.engine.exceptions import EngineDeadError

        if self.dies and len(self.calls) > 3:
            raise EngineDeadError
        self.calls.append((prompt["prompt_token_ids"], params.seed, data_parallel_rank))


@pytest.mark.parametrize("dies", [False, True])
@pytest.mark.parametrize("hold", [False, True])
def test_no_step_begins_before_all_prompts_are_in_and_none_is_kept_back_afterwards(hold, dies):
    settings = {"banned_ids": [9], "stop": [], "stop_token_ids": [4], "n": 2, "seed": 2**63 - 1}
    asked = [WireRequest(index, ids(index), (), settings) for index in range(3)]
    engine = RecordingEngine(dies)
    added = add_batch(engine, Batch(asked, []), None, hold)
    if dies:
        with pytest.raises(Exception, match="EngineCore"):
            asyncio.run(added)
    else:
        assert [(running.index, len(running.queues)) for running in asyncio.run(added)] == [(0, 2), (1, 2), (2, 2)]
    before, after = (["pause keep False"], ["resume"]) if hold else ([], [])
    # Completion i has the seed + i; a prompt's completions go to one engine of two.
    prompts = [([index], seed, index % 2) for index in range(3) for seed in (2**63 - 1, 0)]
    assert engine.calls == before + prompts[: (3 if hold else 4) if dies else 6] + after


# --- a real server ---


def test_every_route_but_health_wants_the_key(engine):
    server = engine.server
    assert http.get(f"{server.url}/health", timeout=10).status_code == 200
    paths = (PATH, "/v1/chat/completions", "/v1/models", "/update_weights", "/collective_rpc", "/start_weight_update")
    for path in paths:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": server.api_key}):
            assert http.post(server.url + path, json={}, headers=headers, timeout=10).status_code == 401
            assert http.get(server.url + path, headers=headers, timeout=10).status_code == 401


def test_what_is_no_batch_is_refused(engine):
    client, url = engine.client, engine.server.url + PATH
    headers = {"Authorization": f"Bearer {client.api_key}"}
    assert http.get(url, headers=headers, timeout=10).status_code == 405
    answer = http.post(url, data=b"{}", headers=headers, timeout=10)
    assert answer.status_code == 400 and "version" in answer.json()["error"]["message"]
    place = json.dumps({"path": "/proc/1/fd/1", "name": "grpo_vlm-0"})
    answer = http.post(url, data=place, headers=headers | {"Content-Type": SHARED_TYPE}, timeout=10)
    assert answer.status_code == 422 and "cannot be read" in answer.json()["error"]["message"]


def test_the_bytes_of_a_batch_do_as_well_as_shared_memory(engine):
    batch = requests(prompts(engine.processor))
    assert engine.client.shares_memory
    through_memory = engine.client.generate(batch, 0)
    assert engine.client.shares_memory  # it was read
    engine.client.shares_memory = False
    assert engine.client.generate(batch, 0) == through_memory
    engine.client.shares_memory = True


def test_a_faulty_prompt_names_its_row_and_the_others_are_not_harmed(engine):
    one, _, two, _ = prompts(engine.processor)
    answers = {}
    for broken, message in (
        (SimpleNamespace(**vars(two) | {"image_grid_thw": two.image_grid_thw.flip(0)}), "the patch grid"),
        (SimpleNamespace(**vars(one) | {"token_ids": [1, *([5] * 400)], **without_pictures()}), "320"),
        (SimpleNamespace(**vars(one) | {"token_ids": [10**6], **without_pictures()}), "out of vocabulary"),
    ):
        broken.row_id = "train:77"
        batch = [Request(broken, Sampling(n=2, max_tokens=3), 5), *requests([one, two])]
        with pytest.raises(RequestRefused, match=f"row train:77: .*400.*{message}"):
            engine.client.generate(batch, 0, on_answer=answers.__setitem__)
    assert engine.client.generate(requests([one, two]), 0)  # the server goes on


def without_pictures():
    return {"image_keys": (), "pixels": (), "image_grid_thw": None}


def test_other_sampling_settings_than_the_servers_are_refused(engine):
    request = requests(prompts(engine.processor)[1:2], temperature=-1.0)
    with pytest.raises(RequestRefused, match=r"400: .*temperature"):
        engine.client.generate(request, 0)


def test_an_adapter_that_is_not_there_is_said_so(engine):
    engine.client.adapter = "lora"
    try:
        with pytest.raises(RolloutError, match="409: there is no adapter 'lora'; loaded: none"):
            engine.client.generate(requests(prompts(engine.processor)[1:2]), 0)
    finally:
        engine.client.adapter = None


def test_a_paused_engine_says_so_instead_of_keeping_the_client_waiting(engine):
    engine.client.post("/pause", mode="keep", clear_cache="false")
    try:
        with pytest.raises(RolloutError, match="409: the engine sleeps or is paused"):
            engine.client.generate(requests(prompts(engine.processor)[1:2]), 0)
    finally:
        engine.client.post("/resume")
    assert engine.client.generate(requests(prompts(engine.processor)[1:2]), 0)


def test_prompts_of_a_client_that_goes_away_are_dropped(engine):
    batch = requests(prompts(engine.processor), n=8, max_tokens=200, ignore_eos=True)

    def leave():
        raise RolloutError("had enough")

    assert engine.client.post("/reset_prefix_cache")["success"]
    with pytest.raises(RolloutError, match="had enough"):
        engine.client.generate(batch, 0, watch=leave)
    deadline = time.monotonic() + 5
    while not engine.client.post("/reset_prefix_cache")["success"]:  # "no" while a request is running
        assert time.monotonic() < deadline, "the engine still computes for nobody"
        time.sleep(0.1)


def test_two_calls_at_one_time_do_not_disturb_each_other(engine):
    rows = prompts(engine.processor)
    first, second = requests(rows, max_tokens=40), requests(rows, purpose="val", max_tokens=40)
    expected = engine.client.generate(first, 0), engine.client.generate(second, 0)
    client, found = engine.client, {}
    other = VLLMClient(
        client.url, client.api_key, tokenizer=client.tokenizer, eos_ids=client.eos_ids, banned_ids=client.banned_ids
    )
    thread = threading.Thread(target=lambda: found.setdefault("other", other.generate(second, 0)))
    thread.start()
    mine = client.generate(first, 0)
    thread.join(60)
    assert (mine, found["other"]) == expected


def video_prompt(kind, tokenizer, config):
    """Token ids and patch grid of a prompt with a video. Qwen3-VL writes a time stamp before each frame."""
    start, end, pad = config.vision_start_token_id, config.vision_end_token_id, config.video_token_id
    if kind == "qwen3_vl":
        shown, grid = [], (3, 4, 6)
        for second in range(3):
            shown += [*tokenizer(f"<{second}.0 s>")["input_ids"], start, *[pad] * 6, end]
    else:
        shown, grid = [start, *[pad] * 30, end], (5, 4, 6)  # longer than wide
    return [*tokenizer("Look: ")["input_ids"], *shown, *tokenizer(" what moves?")["input_ids"]], grid


@torch.no_grad()
def video_logprobs(model, tokens, video, completion, banned_ids):
    """float32 [T]: a plain forward pass."""
    sequence = torch.tensor([[*tokens, *completion.token_ids]])
    seconds = None if video.seconds_per_grid is None else [video.seconds_per_grid]
    positions = prompt_positions(model, tokens, video_grids=torch.tensor([video.grid]), seconds_per_grid=seconds)
    after = positions.max() + 1 + torch.arange(len(completion.token_ids)).expand(3, -1)
    logits = model.eval()(
        input_ids=sequence,
        mm_token_type_ids=(sequence == model.config.video_token_id).int() * 2,
        pixel_values_videos=video.pixels,
        video_grid_thw=torch.tensor([video.grid]),
        position_ids=torch.cat([positions, after], dim=1)[:, None],
    ).logits[0, len(tokens) - 1 : -1]
    logits[:, banned_ids] = float("-inf")
    return logits.log_softmax(-1).gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]


@pytest.mark.parametrize(("kind", "seconds"), [("qwen2_5_vl", 1.5), ("qwen2_5_vl", 0.48), ("qwen3_vl", 1.0)])
def test_videos_are_computed_as_the_trainer_does(vllm_engine, kind, seconds, monkeypatch):
    engine = vllm_engine(kind)
    model = load(engine)
    engine.sync(model, 0)
    tokens, grid = video_prompt(kind, engine.processor.tokenizer, model.config)
    patch = model.config.vision_config
    width = 3 * patch.temporal_patch_size * patch.patch_size**2
    pixels = torch.randn(int(np.prod(grid)), width, generator=torch.Generator().manual_seed(0))
    video = Media(f"video {seconds}", "video", pixels, grid, seconds)
    request = Request(SimpleNamespace(row_id="v:0", token_ids=tokens), Sampling(n=2, max_tokens=8), 11)
    asked = WireRequest(0, np.asarray(tokens, np.int32), (0,), engine.client.sampling(request))
    monkeypatch.setattr(engine.client, "wire_batch", lambda batch, rows: Batch([asked], [video]))
    for completion in engine.client.generate([request], 0)[0]:
        expected = video_logprobs(model, tokens, video, completion, engine.banned_ids)
        assert (torch.tensor(completion.logprobs) - expected).abs().max() <= BOUND


class BreakingWorker:
    """Extends vLLM's worker (worker_extension_cls): its sampler fails from now on."""

    def break_sampler(self):
        def fail(*args, **kwargs):
            raise RuntimeError("broken by the test")

        self.model_runner.sampler.forward = fail


def test_an_engine_that_dies_writes_neither_pictures_nor_the_key(tmp_path):
    path = tiny_model("qwen2_5_vl", tmp_path)
    settings = ServerSettings(
        model_path=str(path),
        device="cpu",
        max_model_len=320,
        cpu_kv_cache_gb=0.2,
        engine_kwargs={"worker_extension_cls": f"{__name__}.BreakingWorker"},
    )
    server = VLLMServer(settings, tmp_path / "vllm.log")
    server.start()
    try:
        model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)
        from transformers import AutoProcessor

        processor = AutoProcessor.from_pretrained(path)
        client = VLLMClient(
            server.url,
            server.api_key,
            tokenizer=processor.tokenizer,
            eos_ids=[1],
            banned_ids=banned_token_ids(processor, model.config),
        )
        batch = requests(prompts(processor))
        assert client.generate(batch, 0)
        client.post("/collective_rpc", {"method": "break_sampler"})
        with pytest.raises(ServerGone):
            client.generate(requests(prompts(processor), purpose="other"), 0)
    finally:
        server.stop()
    log = server.log_path.read_text()
    assert "broken by the test" in log
    assert server.api_key not in log
    assert "tensor(" not in log and "base64" not in log and "pixel_values" not in log
    value = f"{float(batch[0].prompt.pixels[0][0, 0]):.4f}"
    assert value not in log


def test_the_key_is_needed_before_anything_is_read(monkeypatch):
    monkeypatch.setenv("GRPO_VLM_ROLLOUT_KEY", "secret")
    sent = []

    async def inner(scope, receive, send):
        raise AssertionError("reached without the key")

    async def receive():
        raise AssertionError("the body was read")

    async def send(message):
        sent.append(message)

    guarded = RequireKey(inner)
    for scope in (
        {"type": "http", "path": PATH, "headers": []},
        {"type": "websocket", "path": "/v1/realtime", "headers": []},
    ):
        sent.clear()
        with pytest.raises(StopIteration):
            guarded(scope, receive, send).send(None)
        assert sent[0].get("status", sent[0].get("code")) in (401, 1008)
