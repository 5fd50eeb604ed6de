"""What the client makes of a faulty server. A real vLLM does not misbehave on demand, so a small HTTP server does."""

import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
import requests

from grpo_vlm.errors import RolloutError
from grpo_vlm.rollout.client import VLLMClient
from grpo_vlm.rollout.server import ServerSettings, VLLMServer
from grpo_vlm.rollout.types import Request, Sampling

GOOD = {
    "prompt_token_ids": [1, 2],
    "choices": [
        {"index": 1, "token_ids": [5], "logprobs": {"content": [{"logprob": -0.5}]}, "finish_reason": "length"},
        {
            "index": 0,
            "token_ids": [3, 4],
            "logprobs": {"content": [{"logprob": -0.25}, {"logprob": -1.0}]},
            "finish_reason": "stop",
        },
    ],
}


@pytest.fixture
def faulty():
    """A client, and the list of what its server does next: (status, body), or None to close the connection."""
    script, seen = [], []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            seen.append(json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}"))
            answer = script.pop(0)
            if answer is None:
                self.close_connection = True
                return
            status, body = answer
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    tokenizer = SimpleNamespace(decode=lambda ids, skip_special_tokens: str(ids))
    client = VLLMClient(
        f"http://127.0.0.1:{server.server_port}", "key", tokenizer=tokenizer, eos_ids=[4], banned_ids=[9]
    )
    yield client, script, seen
    server.shutdown()
    server.server_close()


def request(row_id="data:5"):
    prompt = SimpleNamespace(
        row_id=row_id, messages=[{"role": "user", "content": "hello"}], token_ids=[1, 2], images=[]
    )
    return Request(prompt, Sampling(n=2, max_tokens=2), seed=2**62)


def test_a_good_answer_in_the_order_of_its_choices(faulty):
    client, script, seen = faulty
    script.append((200, GOOD))
    first, second = client.generate([request()], version=4)[0]
    assert (first.token_ids, first.logprobs, first.finish_reason) == ((3, 4), (-0.25, -1.0), "stop")
    assert (second.token_ids, second.version) == ((5,), 4)
    assert seen[0]["seed"] == 2**62 and seen[0]["n"] == 2
    assert seen[0]["logit_bias"] == {"9": -100.0} and seen[0]["stop_token_ids"] == [4]


def test_a_connection_that_the_server_closed_is_opened_again(faulty):
    client, script, seen = faulty
    script += [None, (200, GOOD)]
    assert len(client.generate([request()], 0)[0]) == 2
    assert client.retries == 1 and len(seen) == 2 and seen[0] == seen[1]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((500, {"error": {"message": "out of paper"}}), r"row data:5: .*500: out of paper"),
        ((500, b"no JSON"), r"row data:5: .*500: no JSON"),
        ((200, b"no JSON"), r"row data:5: .*cannot be read.*no JSON"),
        ((200, {"choices": []}), r"row data:5: .*cannot be read.*prompt_token_ids"),
        ((200, GOOD | {"prompt_token_ids": [1, 2, 2]}), r"row data:5: .*3 tokens and the trainer's 2; .*position 2"),
        ((200, GOOD | {"choices": GOOD["choices"][:1]}), r"row data:5: asked .* 2 completions"),
    ],
)
def test_faulty_answers_name_the_row(faulty, answer, message):
    client, script, _ = faulty
    script.append(answer)
    with pytest.raises(RolloutError, match=message):
        client.generate([request()], 0)


def test_a_connection_that_breaks_every_time_names_the_row(faulty):
    client, script, _ = faulty
    script += [None] * 3
    with pytest.raises(RolloutError, match="row data:5: the connection to the vLLM server broke"):
        client.generate([request()], 0)


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
        client.request_timeout_s = 5.0
        assert "http" in requests.utils.get_environ_proxies(client.url)  # a plain request would take it
        script += [(200, {}), (200, GOOD)]
        client.post("/sleep", level=2)
        assert len(client.generate([request()], 0)[0]) == 2
        assert server.healthy()
        with pytest.raises(TimeoutError):
            proxy.accept()


def test_a_server_that_is_not_there(faulty):
    client, _, _ = faulty
    client.url = "http://127.0.0.1:9"
    with pytest.raises(RolloutError, match="row data:5: the connection"):
        client.generate([request()], 0)
    with pytest.raises(RolloutError, match="did not answer /sleep"):
        client.post("/sleep", level=2)
