"""Asks a vLLM server for completions over HTTP: one POST per unique prompt with n = G, token ids in and out.

The server renders and tokenizes the chat messages itself, because only then does it place the image tokens; the ids
that it used come back and must equal the trainer's. Pictures travel as PNG, already resized by the trainer, so that
both sides get the same patch grid.
"""

from __future__ import annotations

import base64
import io
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Any

import requests
from PIL import Image

from grpo_vlm.errors import RolloutError
from grpo_vlm.rollout.server import MODEL_NAME, loopback_session
from grpo_vlm.rollout.types import Completion, Request

CONCURRENCY = 64
CONNECT_S = 10.0
ATTEMPTS = 3
BAN_BIAS = -100.0


class VLLMClient:
    """Speaks to one server. Safe to use from one thread at a time; it runs its own threads for the requests of one
    call.

    tokenizer: decodes completions. eos_ids end a completion, banned_ids are never sampled.
    request_timeout_s: longest wait for the answer to one prompt.
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
    ) -> None:
        self.url = url
        self.tokenizer = tokenizer
        self.eos_ids = list(eos_ids)
        self.banned_ids = list(banned_ids)
        self.request_timeout_s = request_timeout_s
        self.retries = 0
        self._headers = {"Authorization": f"Bearer {api_key}"}
        self._local = threading.local()

    # --- control routes ---

    def post(self, path: str, body: dict[str, Any] | None = None, **params: Any) -> None:
        """POST to a control route on a connection of its own (a reused one may have been closed by the server when
        idle).

        Raises RolloutError with the server's message.
        """
        try:
            with loopback_session() as session:
                answer = session.post(
                    self.url + path,
                    json=body,
                    params=params,
                    headers=self._headers | {"Connection": "close"},
                    timeout=(CONNECT_S, self.request_timeout_s),
                )
        except requests.RequestException as error:
            raise RolloutError(f"the vLLM server did not answer {path}: {error}") from error
        if answer.status_code != 200:
            raise RolloutError(f"the vLLM server answered {path} with {answer.status_code}: {_message(answer)}")

    # --- completions ---

    def generate(
        self, batch: Sequence[Request], version: int, on_progress: Callable[[int], None] | None = None
    ) -> list[list[Completion]]:
        """`sampling.n` completions for each request, in the order of `batch`. `on_progress(done)` counts prompts.

        Raises RolloutError naming the row for a refused prompt, a time-out, or prompt ids that differ from the
        trainer's.
        """
        if not batch:
            return []
        # vLLM on a CPU ignores all seeds of a step in which one request is greedy, so greedy and drawn prompts take
        # turns.
        greedy = [request.sampling.temperature == 0 for request in batch]
        if any(greedy) and not all(greedy):
            return self._in_turns(batch, greedy, version, on_progress)
        pictures = encode_pictures(batch)
        with ThreadPoolExecutor(min(CONCURRENCY, len(batch)), thread_name_prefix="rollout") as pool:
            futures = [pool.submit(self._complete, request, pictures, version) for request in batch]
            done = 0
            for future in futures:
                wait([future], return_when=FIRST_EXCEPTION)
                if future.exception() is not None:
                    pool.shutdown(wait=False, cancel_futures=True)
                    raise future.exception()
                done += 1
                if on_progress is not None:
                    on_progress(done)
        return [future.result() for future in futures]

    def _in_turns(
        self, batch: Sequence[Request], first: list[bool], version: int, on_progress: Callable[[int], None] | None
    ) -> list[list[Completion]]:
        """`generate` for the requests marked in `first`, then for the others; answers in the order of `batch`."""
        answers: dict[int, list[Completion]] = {}
        for turn in (True, False):
            rows = [row for row, marked in enumerate(first) if marked is turn]
            before = len(answers)
            report = None if on_progress is None else lambda done, before=before: on_progress(before + done)
            answers.update(zip(rows, self.generate([batch[row] for row in rows], version, report), strict=True))
        return [answers[row] for row in range(len(batch))]

    def body(self, request: Request, pictures: dict[int, str]) -> dict[str, Any]:
        """The JSON of one request. `pictures` holds a data URL for each image by identity."""
        sampling = request.sampling
        body: dict[str, Any] = {
            "model": MODEL_NAME,
            "messages": chat_messages(request, pictures),
            "n": sampling.n,
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k if sampling.top_k > 0 else 0,
            "seed": request.seed,
            "ignore_eos": sampling.ignore_eos,
            "logit_bias": {str(token): BAN_BIAS for token in self.banned_ids},
            "logprobs": True,
            "top_logprobs": 0,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "skip_special_tokens": False,
        }
        if not sampling.ignore_eos:
            body["stop_token_ids"] = self.eos_ids
        return body

    def _complete(self, request: Request, pictures: dict[int, str], version: int) -> list[Completion]:
        row_id = request.prompt.row_id
        answer = self._post_with_retry(row_id, self.body(request, pictures))
        if answer.status_code != 200:
            raise RolloutError(f"row {row_id}: the vLLM server answered {answer.status_code}: {_message(answer)}")
        try:
            data = answer.json()
            prompt_ids, choices = data["prompt_token_ids"], sorted(data["choices"], key=lambda choice: choice["index"])
            parts = [
                (
                    choice["token_ids"],
                    [entry["logprob"] for entry in choice["logprobs"]["content"]],
                    choice["finish_reason"],
                )
                for choice in choices
            ]
        except (ValueError, KeyError, TypeError) as error:
            raise RolloutError(
                f"row {row_id}: the vLLM server's answer cannot be read: {error!r}: {answer.text[:200]}"
            ) from error
        check_prompt(request, prompt_ids)
        if len(parts) != request.sampling.n or any(len(ids) != len(logprobs) for ids, logprobs, _ in parts):
            lengths = [(len(ids), len(logprobs)) for ids, logprobs, _ in parts]
            raise RolloutError(
                f"row {row_id}: asked the vLLM server for {request.sampling.n} completions with one log-prob per "
                f"token, got (tokens, log-probs) {lengths}"
            )
        return [
            Completion(
                tuple(ids), tuple(logprobs), reason, self.tokenizer.decode(ids, skip_special_tokens=False), version
            )
            for ids, logprobs, reason in parts
        ]

    def _post_with_retry(self, row_id: str, body: dict[str, Any]) -> requests.Response:
        """POST a prompt; again when the connection broke before an answer. The seed makes a repeated request the same
        one."""
        for attempt in range(ATTEMPTS):
            try:
                return self._session().post(
                    f"{self.url}/v1/chat/completions", json=body, timeout=(CONNECT_S, self.request_timeout_s)
                )
            except requests.Timeout as error:
                limit = f"{self.request_timeout_s:g} s (worker.rollout.request_timeout_s)"
                raise RolloutError(f"row {row_id}: no answer from the vLLM server within {limit}") from error
            except (requests.ConnectionError, requests.exceptions.ChunkedEncodingError) as error:
                self._local.session = None
                if attempt == ATTEMPTS - 1:
                    raise RolloutError(f"row {row_id}: the connection to the vLLM server broke: {error}") from error
                self.retries += 1
                time.sleep(0.2 * (attempt + 1))
        raise AssertionError("unreachable")

    def _session(self) -> requests.Session:
        """This thread's session: one kept-alive connection per thread."""
        session = getattr(self._local, "session", None)
        if session is None:
            session = self._local.session = loopback_session()
            session.headers.update(self._headers)
        return session


def check_prompt(request: Request, prompt_ids: list[int]) -> None:
    """RolloutError when the server saw other prompt ids than the trainer will score."""
    expected = list(request.prompt.token_ids)
    if prompt_ids == expected:
        return
    first = next(
        (i for i, (a, b) in enumerate(zip(prompt_ids, expected, strict=False)) if a != b),
        min(len(prompt_ids), len(expected)),
    )
    raise RolloutError(
        f"row {request.prompt.row_id}: the vLLM server's prompt has {len(prompt_ids)} tokens and the trainer's "
        f"{len(expected)}; they differ from position {first} on. The chat template, the tokenizer or the image "
        "size limits (data.min_pixels, data.max_pixels) of the two disagree"
    )


def chat_messages(request: Request, pictures: dict[int, str]) -> list[dict[str, Any]]:
    """The prompt's messages in OpenAI's form, with each image part replaced by the next picture."""
    images = iter(request.prompt.images)
    messages = []
    for message in request.prompt.messages:
        content = message["content"]
        if not isinstance(content, str):
            content = [
                {"type": "image_url", "image_url": {"url": pictures[id(next(images))]}}
                if part["type"] == "image"
                else part
                for part in content
            ]
        messages.append({"role": message["role"], "content": content})
    return messages


def encode_pictures(batch: Sequence[Request]) -> dict[int, str]:
    """A PNG data URL for each distinct image of the batch, by identity."""
    images = {id(image): image for request in batch for image in request.prompt.images}
    return {key: png_data_url(image) for key, image in images.items()}


def png_data_url(image: Image.Image) -> str:
    """Lossless, with the fastest compression: the bytes cross a loopback connection once."""
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", compress_level=1)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def _message(answer: requests.Response) -> str:
    """What the server says went wrong."""
    try:
        error = answer.json()["error"]
    except (ValueError, KeyError, TypeError):
        return answer.text[:500] or answer.reason
    return error["message"] if isinstance(error, dict) else str(error)
