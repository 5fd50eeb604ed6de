"""Asks a vLLM server for completions: one POST for all prompts of a call, token ids and processed pictures there,
token ids and log-probs back as prompts finish (wire.py has the bytes, route.py the server's side).

The trainer's own token ids, pixels and patch grids are what the server computes with, so the two cannot disagree on
them; the ids come back and are compared all the same. Each distinct picture travels once per call.
"""

from __future__ import annotations

import http.client
import json
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import requests
import torch

from grpo_vlm.errors import RolloutError
from grpo_vlm.rollout.failures import RequestRefused, RequestTimedOut, ServerGone, WeightsLost
from grpo_vlm.rollout.server import loopback_session
from grpo_vlm.rollout.types import Completion, Request
from grpo_vlm.rollout.wire import (
    BODY_TYPE,
    PATH,
    SHARED_TYPE,
    UNSHARED,
    WEIGHTS_LOST,
    Answer,
    Batch,
    Failure,
    Media,
    WireRequest,
    can_share,
    encode_batch,
    read_frame,
    shared,
)

CONNECT_S = 10.0
POLL_S = 0.5
ATTEMPTS = 3


class VLLMClient:
    """Speaks to one server. Safe to use from one thread at a time.

    tokenizer: decodes completions. eos_ids end a completion, banned_ids are never sampled.
    request_timeout_s: longest wait for the next answer of a call. pixel_dtype: what the server computes in.
    adapter: name of the LoRA adapter that the server has and shall use. retries: prompts that were asked for again,
    so far.
    """

    def __init__(
        self,
        url: str,
        api_key: str,
        *,
        tokenizer: Any,
        eos_ids: Sequence[int],
        banned_ids: Sequence[int],
        request_timeout_s: float = 600.0,
        pixel_dtype: torch.dtype = torch.float32,
    ) -> None:
        self.tokenizer = tokenizer
        self.eos_ids = list(eos_ids)
        self.banned_ids = list(banned_ids)
        self.request_timeout_s = request_timeout_s
        self.pixel_dtype = pixel_dtype
        self.adapter: str | None = None
        self.weights: str | None = None  # name of those that the server must hold
        self.retries = 0
        self.connect(url, api_key)

    def connect(self, url: str, api_key: str) -> None:
        """Speak to this server from now on. Nothing is sent; each call opens its own connection."""
        self.url, self.api_key = url, api_key
        self.shares_memory = can_share(urlsplit(url).hostname)  # until the server says that it cannot

    @property
    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}", "Connection": "close"}

    # --- control routes ---

    def post(self, path: str, body: dict[str, Any] | None = None, **params: Any) -> Any:
        """POST to a control route of vLLM. Returns the answer's JSON, None when it has none.

        ServerGone when no answer comes, WeightsLost or RolloutError with the server's message when it is not 200.
        """
        return self._control("POST", path, body, params)

    def get(self, path: str) -> Any:
        """GET a control route of vLLM; as `post`."""
        return self._control("GET", path, None, {})

    def _control(self, method: str, path: str, body: dict[str, Any] | None, params: dict[str, Any]) -> Any:
        try:
            with loopback_session() as session:
                answer = session.request(
                    method,
                    self.url + path,
                    json=body,
                    params=params,
                    headers=self._headers,
                    timeout=(CONNECT_S, self.request_timeout_s),
                )
        except requests.RequestException as error:
            raise ServerGone(f"the vLLM server did not answer {path}: {error}") from error
        if answer.status_code != 200:
            kind = WeightsLost if answer.status_code == WEIGHTS_LOST else RolloutError
            text = _message(answer.text or answer.reason)
            raise kind(f"the vLLM server answered {path} with {answer.status_code}: {text}")
        is_json = answer.headers.get("Content-Type", "").startswith("application/json")
        return answer.json() if is_json and answer.content else None

    # --- completions ---

    def generate(
        self,
        batch: Sequence[Request],
        version: int,
        on_progress: Callable[[int], None] | None = None,
        *,
        on_answer: Callable[[int, list[Completion]], None] | None = None,
        watch: Callable[[], None] | None = None,
    ) -> list[list[Completion]]:
        """`sampling.n` completions for each request, in the order of `batch`.

        on_progress(done): prompts finished so far. on_answer(index in batch, completions): once per prompt, as soon as
        it is finished. watch(): about twice a second; what it raises ends the call. All in the caller's thread.

        RequestRefused and RequestTimedOut name a row; ServerGone when the connection breaks ATTEMPTS times;
        RolloutError when the server's prompt differs from the trainer's.
        """
        call = _Call(self, batch, version, on_progress, on_answer, watch)
        # vLLM on a CPU ignores all seeds of a step in which one request is greedy, so greedy and drawn prompts take
        # turns.
        for greedy in (True, False):
            rows = [row for row, request in enumerate(batch) if (request.sampling.temperature == 0) is greedy]
            # In the order of their seeds: the same prompts make the same batches, in whatever order they come.
            call.ask(sorted(rows, key=lambda row: batch[row].seed))
        return [call.answers[row] for row in range(len(batch))]

    def wire_batch(self, batch: Sequence[Request], rows: Sequence[int]) -> Batch:
        """The requests of these rows, each distinct picture and video once and in the server's dtype."""
        media: dict[str, Media] = {}
        numbers: dict[str, int] = {}
        asked = []
        for row in rows:
            prompt = batch[row].prompt
            grids = [] if prompt.image_grid_thw is None else prompt.image_grid_thw.tolist()
            for key, pixels, grid in zip(prompt.image_keys, prompt.pixels, grids, strict=True):
                if key not in media:
                    numbers[key] = len(media)
                    media[key] = Media(key, "image", pixels.to(self.pixel_dtype), tuple(grid))
            for clip in prompt.videos:
                if clip.key not in media:
                    numbers[clip.key] = len(media)
                    pixels, grid = clip.pixels.to(self.pixel_dtype), tuple(clip.grid.tolist())
                    media[clip.key] = Media(clip.key, "video", pixels, grid, clip.seconds_per_grid)
            ids = np.asarray(prompt.token_ids, np.int32)
            places = tuple(numbers[key] for key in (*prompt.image_keys, *(clip.key for clip in prompt.videos)))
            asked.append(WireRequest(row, ids, places, self.sampling(batch[row])))
        return Batch(asked, list(media.values()), self.adapter, weights=self.weights)

    def sampling(self, request: Request) -> dict[str, Any]:
        """Keyword arguments of `route.sampling_params`."""
        sampling = request.sampling
        return {
            "n": sampling.n,
            "seed": request.seed,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": max(sampling.top_k, 0),
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "max_tokens": sampling.max_tokens,
            "ignore_eos": sampling.ignore_eos,
            "stop": list(sampling.stop),
            "stop_token_ids": [*([] if sampling.ignore_eos else self.eos_ids), *sampling.stop_token_ids],
            "banned_ids": self.banned_ids,
        }


class _Call:
    """One call of `generate`: what is known so far, and how to get the rest."""

    def __init__(
        self,
        client: VLLMClient,
        batch: Sequence[Request],
        version: int,
        on_progress: Callable[[int], None] | None,
        on_answer: Callable[[int, list[Completion]], None] | None,
        watch: Callable[[], None] | None,
    ) -> None:
        self.client, self.batch, self.version = client, batch, version
        self.on_progress, self.on_answer, self.watch = on_progress, on_answer, watch
        self.answers: dict[int, list[Completion]] = {}

    def ask(self, rows: Sequence[int]) -> None:
        """Fill `answers` for these rows; again for those left over when the connection breaks or the server errs."""
        for attempt in range(ATTEMPTS):
            missing = [row for row in rows if row not in self.answers]
            if not missing:
                return
            if attempt:
                self.client.retries += len(missing)
                time.sleep(0.2 * attempt)
            error = self._ask_once(missing)
        if error is not None:
            raise error

    def _ask_once(self, rows: Sequence[int]) -> RolloutError | None:
        """One POST. Returns the error that another attempt may cure, None when all rows were answered."""
        failed: RolloutError | None = None
        exchange = _Exchange(self.client, encode_batch(self.client.wire_batch(self.batch, rows)))
        try:
            while True:
                event = self._next(exchange, rows)
                if event is None:
                    return failed
                if isinstance(event, RolloutError):
                    raise event
                if isinstance(event, Exception):
                    return ServerGone(f"the connection to the vLLM server broke: {event or type(event).__name__}")
                if isinstance(event, _BadStatus):
                    if event.status == UNSHARED and self.client.shares_memory:
                        self.client.shares_memory = False
                        return self._ask_once(rows)
                    return self._bad_status(event)
                if isinstance(event, Failure):
                    failed = self._failure(event)
                else:
                    self._take(event)
        finally:
            exchange.close()

    def _next(self, exchange: _Exchange, rows: Sequence[int]) -> Any:
        """The next event of the exchange, with a look at the clock and at `watch` meanwhile."""
        limit_s = self.client.request_timeout_s
        deadline = time.monotonic() + limit_s
        while True:
            try:
                return exchange.events.get(timeout=max(0.0, min(POLL_S, deadline - time.monotonic())))
            except queue.Empty:
                pass
            if self.watch is not None:
                self.watch()
            if time.monotonic() >= deadline:
                first = next(row for row in rows if row not in self.answers)
                raise RequestTimedOut(self.batch[first].prompt.row_id, limit_s)

    def _failure(self, failure: Failure) -> RolloutError:
        """What the failure of one prompt means; raised at once when asking again cannot help."""
        row_id = self.batch[failure.index].prompt.row_id
        if failure.status == 503:
            return ServerGone(f"row {row_id}: the vLLM server answered 503: {failure.reason}")
        refused = RequestRefused(row_id, failure.status, failure.reason)
        if failure.status < 500:
            raise refused
        return refused

    def _bad_status(self, answer: _BadStatus) -> RolloutError:
        """What an answer that is no stream means: gone for 5xx, a fault that stays for the others (raised)."""
        text = f"the vLLM server answered {PATH} with {answer.status}: {_message(answer.text)}"
        if answer.status >= 500:
            return ServerGone(text)
        if answer.status == WEIGHTS_LOST:
            raise WeightsLost(text)
        if answer.status == 404:
            text += ". Is it started with grpo_vlm's middleware (python -m grpo_vlm.rollout.serve)?"
        raise RolloutError(text)

    def _take(self, answer: Answer) -> None:
        request = self.batch[answer.index]
        check_prompt(request, answer.prompt_ids)
        lengths = [(len(ids), len(logprobs)) for ids, logprobs in zip(answer.token_ids, answer.logprobs, strict=True)]
        if len(lengths) != request.sampling.n or any(tokens != logprobs for tokens, logprobs in lengths):
            raise RolloutError(
                f"row {request.prompt.row_id}: asked the vLLM server for {request.sampling.n} completions with one "
                f"log-prob per token, got (tokens, log-probs) {lengths}"
            )
        decode = self.client.tokenizer.decode
        completions = []
        for ids, logprobs, reason in zip(answer.token_ids, answer.logprobs, answer.reasons, strict=True):
            text = decode(ids.tolist(), skip_special_tokens=False)
            completions.append(Completion(tuple(ids.tolist()), tuple(logprobs.tolist()), reason, text, self.version))
        self.answers[answer.index] = completions
        if self.on_answer is not None:
            self.on_answer(answer.index, completions)
        if self.on_progress is not None:
            self.on_progress(len(self.answers))


class _BadStatus:
    """An HTTP answer that is not 200."""

    def __init__(self, status: int, text: str) -> None:
        self.status, self.text = status, text


class _Exchange(threading.Thread):
    """One POST in a thread of its own, so that its caller can look at the clock. `events`: frames as they come, then
    None; or what went wrong."""

    def __init__(self, client: VLLMClient, pieces: list[memoryview | bytes]) -> None:
        super().__init__(name="rollout", daemon=True)
        self.events: queue.SimpleQueue[Answer | Failure | _BadStatus | Exception | None] = queue.SimpleQueue()
        self.pieces, self.headers, self.share = pieces, client._headers, client.shares_memory
        self.socket: socket.socket | None = None
        self.closed = False
        address = urlsplit(client.url)
        # http.client knows no proxies, no .netrc: nobody else sees the traffic or the key.
        kind = http.client.HTTPSConnection if address.scheme == "https" else http.client.HTTPConnection
        self.connection = kind(address.hostname, address.port, timeout=CONNECT_S)
        self.path = address.path.rstrip("/") + PATH
        self.start()

    def run(self) -> None:
        try:
            self._exchange()
        except (OSError, EOFError, http.client.HTTPException) as error:
            self.events.put(error)
        except Exception as error:  # a fault of ours must not look like a server that is silent
            self.events.put(RolloutError(f"the vLLM server's answer cannot be read: {error!r}"))
        finally:
            self.connection.close()

    def _exchange(self) -> None:
        self.connection.connect()
        self.socket = self.connection.sock
        self.socket.settimeout(None)  # the caller watches the time, and closes
        if self.closed:
            return
        if self.share:
            with shared(self.pieces) as body:
                answer = self._post([body], SHARED_TYPE)
        else:
            answer = self._post(self.pieces, BODY_TYPE)
        self.pieces = []
        if answer.status != 200:
            self.events.put(_BadStatus(answer.status, answer.read().decode(errors="replace")))
            return
        while (frame := read_frame(answer.read)) is not None:
            self.events.put(frame)
        self.events.put(None)

    def _post(self, body: list[memoryview | bytes], kind: str) -> http.client.HTTPResponse:
        headers = self.headers | {"Content-Type": kind, "Content-Length": str(sum(map(len, body)))}
        self.connection.request("POST", self.path, body=body, headers=headers)
        return self.connection.getresponse()

    def close(self) -> None:
        """End the exchange wherever it is; the server then drops the prompts that are left."""
        self.closed = True
        if self.socket is not None:
            try:
                self.socket.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # it was closed by the other side or by the thread


def check_prompt(request: Request, prompt_ids: np.ndarray) -> None:
    """RolloutError when the server saw other prompt ids than the trainer will score."""
    expected = np.asarray(request.prompt.token_ids, np.int32)
    if np.array_equal(prompt_ids, expected):
        return
    shared = min(len(prompt_ids), len(expected))
    differing = np.flatnonzero(prompt_ids[:shared] != expected[:shared])
    first = int(differing[0]) if len(differing) else shared
    raise RolloutError(
        f"row {request.prompt.row_id}: the vLLM server's prompt has {len(prompt_ids)} tokens and the trainer's "
        f"{len(expected)}; they differ from position {first} on"
    )


def _message(text: str) -> str:
    """What the server says went wrong."""
    try:
        error = json.loads(text)["error"]
    except (ValueError, KeyError, TypeError):
        return text[:500]
    return error["message"] if isinstance(error, dict) else str(error)
