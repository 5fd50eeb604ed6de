"""What the client makes of a faulty server. A real vLLM does not misbehave on demand, so a small HTTP server does."""

import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import numpy as np
import pytest
import requests
import torch

from grpo_vlm.errors import RolloutError
from grpo_vlm.rollout.client import VLLMClient
from grpo_vlm.rollout.failures import RequestRefused, RequestTimedOut, ServerGone
from grpo_vlm.rollout.server import ServerSettings, VLLMServer
from grpo_vlm.rollout.types import Request, Sampling
from grpo_vlm.rollout.wire import (
    BODY_TYPE,
    SHARED_TYPE,
    Answer,
    Failure,
    decode_batch,
    encode_answer,
    encode_end,
    encode_failure,
    open_shared,
)

END = encode_end()
GIVE_UP = object()  # close the connection
SILENCE = object()  # keep it open and say nothing


def answer(index=0, prompt=(1, 2), lengths=(2, 1), reasons=("stop", "length")):
    """A frame with the token ids 3, 4, ... and the log-probs -0.25, -0.5, ..."""
    numbers = [np.arange(length, dtype=np.int32) for length in lengths]
    logprobs = [(-0.25 * (1 + part)).astype(np.float32) for part in numbers]
    prompt_ids = np.array(prompt, np.int32)
    return encode_answer(Answer(index, prompt_ids, [3 + part for part in numbers], logprobs, list(reasons)))


@pytest.fixture
def faulty():
    """A client, what its server does next (one entry per POST: a status, then parts of the body), and the batches that
    it saw."""
    script, seen, open_ended = [], [], threading.Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            kind = self.headers["Content-Type"]
            seen.append(
                decode_batch(open_shared(body) if kind == SHARED_TYPE else bytearray(body))
                if kind in (SHARED_TYPE, BODY_TYPE)
                else body
            )
            parts = script.pop(0)
            self.close_connection = True
            if parts[0] is GIVE_UP:
                return
            self.send_response(parts[0])
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for part in parts[1:]:
                if part is GIVE_UP:
                    return
                if part is SILENCE:
                    open_ended.wait(10)
                    return
                self.wfile.write(b"%x\r\n%b\r\n" % (len(part), part))
            self.wfile.write(b"0\r\n\r\n")

        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.handle_error = lambda *_: None  # the client may have closed
    threading.Thread(target=server.serve_forever, daemon=True).start()
    tokenizer = SimpleNamespace(decode=lambda ids, skip_special_tokens: str(ids))
    client = VLLMClient(
        f"http://127.0.0.1:{server.server_port}",
        "key",
        tokenizer=tokenizer,
        eos_ids=[4],
        banned_ids=[9],
        request_timeout_s=5.0,
    )
    yield client, script, seen
    open_ended.set()
    server.shutdown()
    server.server_close()


def request(row_id="data:5", seed=2**62, **sampling):
    prompt = SimpleNamespace(row_id=row_id, token_ids=[1, 2], image_keys=(), pixels=(), image_grid_thw=None, videos=())
    return Request(prompt, Sampling(**{"n": 2, "max_tokens": 2} | sampling), seed)


def shown(row_id, seed, *pictures):
    """A request with pictures, given as (key, value): 4 x 3 patches of that value."""
    prompt = SimpleNamespace(
        row_id=row_id,
        token_ids=[1, 2],
        image_keys=tuple(key for key, _ in pictures),
        pixels=tuple(torch.full((4, 3), float(value)) for _, value in pictures),
        image_grid_thw=torch.tensor([[1, 2, 2]] * len(pictures)),
        videos=(),
    )
    return Request(prompt, Sampling(n=2, max_tokens=2), seed)


def test_an_answer_becomes_completions(faulty):
    client, script, seen = faulty
    script.append((200, answer(), END))
    first, second = client.generate([request()], version=4)[0]
    assert (first.token_ids, first.logprobs, first.finish_reason) == ((3, 4), (-0.25, -0.5), "stop")
    assert (second.token_ids, second.text, second.version) == ((3,), "[3]", 4)
    (asked,) = seen[0].requests
    assert asked.token_ids.tolist() == [1, 2] and asked.sampling["seed"] == 2**62 and asked.sampling["n"] == 2
    assert asked.sampling["banned_ids"] == [9] and asked.sampling["stop_token_ids"] == [4]
    assert seen[0].hold and seen[0].adapter is None


def test_end_tokens_are_not_sent_with_ignore_eos(faulty):
    client, _, _ = faulty
    assert client.sampling(request(ignore_eos=True, stop_token_ids=(7,)))["stop_token_ids"] == [7]
    assert client.sampling(request(stop=("x",), stop_token_ids=(7,)))["stop_token_ids"] == [4, 7]


def test_one_post_with_each_picture_once_in_the_order_of_the_seeds(faulty):
    client, script, seen = faulty
    batch = [shown("a", 30, ("k1", 1), ("k2", 2)), shown("b", 10, ("k2", 2)), shown("c", 20, ("k3", 3))]
    script.append((200, answer(1), answer(0), answer(2), END))
    progress, finished = [], []
    answers = client.generate(batch, 0, progress.append, on_answer=lambda index, _: finished.append(index))
    assert [len(completions) for completions in answers] == [2, 2, 2]
    assert progress == [1, 2, 3] and finished == [1, 0, 2]
    assert [asked.index for asked in seen[0].requests] == [1, 2, 0]
    assert [asked.media for asked in seen[0].requests] == [(0,), (1,), (2, 0)]
    assert [(item.key, float(item.pixels[0, 0]), item.grid) for item in seen[0].media] == [
        ("k2", 2.0, (1, 2, 2)),
        ("k3", 3.0, (1, 2, 2)),
        ("k1", 1.0, (1, 2, 2)),
    ]


def test_pictures_travel_in_the_servers_dtype(faulty):
    client, _, _ = faulty
    client.pixel_dtype = torch.bfloat16
    (item,) = client.wire_batch([shown("a", 1, ("k", 0.1))], [0]).media
    assert item.pixels.dtype == torch.bfloat16


def test_greedy_and_drawn_prompts_take_turns(faulty):
    client, script, seen = faulty
    script += [(200, answer(1), END), (200, answer(0), answer(2), END)]
    batch = [request(seed=1), request(seed=2, temperature=0.0), request(seed=3)]
    assert len(client.generate(batch, 0)) == 3
    assert [[asked.index for asked in batch.requests] for batch in seen] == [[1], [0, 2]]


def test_a_server_that_cannot_read_the_memory_gets_the_bytes(faulty):
    client, script, seen = faulty
    script += [(422, b"no"), (200, answer(), END), (200, answer(), END)]
    assert client.shares_memory
    assert len(client.generate([request()], 0)[0]) == 2
    assert not client.shares_memory and client.retries == 0 and len(seen) == 2
    client.generate([request()], 0)
    assert len(seen) == 3  # it is not tried again
    client.connect(client.url, "other")
    assert client.shares_memory


def test_a_broken_connection_is_opened_again_for_what_is_missing(faulty):
    client, script, seen = faulty
    script += [(GIVE_UP,), (200, answer(1), GIVE_UP), (200, answer(0), END)]
    finished = []
    batch = [request("a", 1), request("b", 2)]
    assert len(client.generate(batch, 0, on_answer=lambda index, _: finished.append(index))) == 2
    assert [[asked.index for asked in batch.requests] for batch in seen] == [[0, 1], [0, 1], [0]]
    assert finished == [1, 0] and client.retries == 3


def test_a_connection_that_breaks_every_time(faulty):
    client, script, _ = faulty
    script += [(200, answer(1), GIVE_UP), (GIVE_UP,), (503, b'{"error": {"message": "the engine is dead"}}')]
    finished = []
    with pytest.raises(ServerGone, match="503: the engine is dead"):
        client.generate([request("a", 1), request("b", 2)], 0, on_answer=lambda index, _: finished.append(index))
    assert finished == [1]


def test_an_answer_without_its_end_is_a_broken_connection(faulty):
    client, script, _ = faulty
    script += [(200, answer(), b"")] + [(200,)] * 2  # complete HTTP answers, all without the last frame
    batch = [request("a", 1), request("b", 2)]
    with pytest.raises(ServerGone, match="ends in the middle"):
        client.generate(batch, 0)


def test_a_refused_prompt_ends_the_call_at_once(faulty):
    client, script, _ = faulty
    script.append((200, answer(0), encode_failure(Failure(1, 400, "too long")), SILENCE))
    finished = []
    with pytest.raises(RequestRefused, match="row b: the vLLM server answered 400: too long") as caught:
        client.generate([request("a", 1), request("b", 2)], 0, on_answer=lambda index, _: finished.append(index))
    assert finished == [0] and caught.value.row_id == "b" and client.retries == 0


def test_a_prompt_that_fails_is_asked_again_after_the_others(faulty):
    client, script, seen = faulty
    failure = encode_failure(Failure(0, 500, "out of paper"))
    script += [(200, failure, answer(1), END), (200, answer(0), END)]
    assert len(client.generate([request("a", 1), request("b", 2)], 0)) == 2
    assert [asked.index for asked in seen[1].requests] == [0] and client.retries == 1
    script += [(200, failure, END)] * 3
    with pytest.raises(RequestRefused, match=r"row a: .*500: out of paper"):
        client.generate([request("a", 1)], 0)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ((200, answer(prompt=(1, 2, 2)), END), r"row data:5: .*3 tokens and the trainer's 2; .*position 2"),
        ((200, answer(prompt=(7, 2)), END), r"row data:5: .*2 tokens and the trainer's 2; .*position 0"),
        ((200, answer(lengths=(2,), reasons=("stop",)), END), r"row data:5: asked .* 2 completions"),
        ((200, answer(reasons=("stop",)), END), r"cannot be read"),
        ((400, b'{"error": {"message": "no batch"}}'), r"answered /grpo_vlm/generate with 400: no batch"),
        ((401, b'{"error": "Unauthorized"}'), r"answered /grpo_vlm/generate with 401: Unauthorized"),
        ((404, b"not JSON"), r"404: not JSON. Is it started with grpo_vlm's middleware"),
    ],
)
def test_faulty_answers_say_what_is_wrong(faulty, parts, message):
    client, script, seen = faulty
    script.append(parts)
    with pytest.raises(RolloutError, match=message) as caught:
        client.generate([request()], 0)
    assert not isinstance(caught.value, ServerGone) and len(seen) == 1


def test_silence_runs_into_the_time_out_of_the_next_answer(faulty):
    client, script, _ = faulty
    client.request_timeout_s = 0.6
    script.append((200, answer(0), SILENCE))
    began = time.monotonic()
    with pytest.raises(RequestTimedOut, match=r"row b: no answer .*0.6 s \(worker.rollout.request_timeout_s\)"):
        client.generate([request("a", 1), request("b", 2)], 0)
    assert time.monotonic() - began < 3


def test_watch_can_end_a_call_and_leaves_no_thread(faulty):
    client, script, _ = faulty
    script.append((200, SILENCE))
    calls = []

    def watch():
        calls.append(time.monotonic())
        if len(calls) == 2:
            raise ServerGone("somebody saw it fall")

    with pytest.raises(ServerGone, match="somebody saw it fall"):
        client.generate([request()], 0, watch=watch)
    assert calls[1] - calls[0] < 1.5
    for thread in [thread for thread in threading.enumerate() if thread.name == "rollout"]:
        thread.join(2)
        assert not thread.is_alive()


def test_no_request_goes_to_a_proxy(faulty, monkeypatch, tmp_path):
    client, script, _ = faulty
    server = VLLMServer(ServerSettings(model_path="m", device="cpu", max_model_len=8), tmp_path / "vllm.log")
    server.port = int(client.url.rpartition(":")[2])
    with socket.socket() as proxy:
        proxy.bind(("127.0.0.1", 0))
        proxy.listen()
        proxy.settimeout(0.2)
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.getsockname()[1]}")
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        assert "http" in requests.utils.get_environ_proxies(client.url)  # a plain request would take it
        script += [(200, b"{}"), (200, answer(), END)]
        client.post("/sleep", level=2)
        assert len(client.generate([request()], 0)[0]) == 2
        assert server.healthy()
        with pytest.raises(TimeoutError):
            proxy.accept()


def test_a_server_that_is_not_there(faulty):
    client, _, _ = faulty
    client.connect("http://127.0.0.1:9", "key")
    with pytest.raises(ServerGone, match="connection to the vLLM server broke"):
        client.generate([request()], 0)
    with pytest.raises(ServerGone, match="did not answer /sleep"):
        client.post("/sleep", level=2)


def test_an_empty_batch_asks_nothing(faulty):
    client, _, seen = faulty
    assert client.generate([], 0) == [] and not seen
