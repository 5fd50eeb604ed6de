"""Starts, watches and stops one vLLM server (an HTTP server with our own route and vLLM's weight-transfer routes), or
finds one that runs already.

Why a process of its own: it has its own threads, compiled graphs and memory, it may die without the trainer, and the
same code serves CPU and CUDA. It listens on 127.0.0.1 only, with a random key that exists in its environment and
nowhere else, and it is started through guard.py, so that it never outlives the trainer.
"""

from __future__ import annotations

import atexit
import importlib.metadata
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import requests

from grpo_vlm.errors import RolloutError
from grpo_vlm.rollout import diagnosis, versions
from grpo_vlm.rollout.command import (
    KEY_VARIABLE,
    MODEL_NAME,
    PLUGIN,
    ServerSettings,
    server_command,
    server_environment,
)
from grpo_vlm.rollout.guard import end_in_words
from grpo_vlm.rollout.wire import WEIGHTS_PATH

GUARD = Path(__file__).with_name("guard.py")
STOP_S = 8.0
LOG_TAIL, LOG_READ = 30, 400  # lines: those that are shown, those that are searched for the cause


class VLLMServer:
    """One server process. `start` blocks until it answers; `stop` may be called any number of times.

    `log_path` is appended to. `api_key`: null: a random one. After `start`, `url` and `api_key` are what a client
    needs.
    """

    def __init__(self, settings: ServerSettings, log_path: str | Path, api_key: str | None = None) -> None:
        self.settings = settings
        self.log_path = Path(log_path)
        self.api_key = api_key or secrets.token_urlsafe(32)
        self.port: int | None = None
        self.process: subprocess.Popen[bytes] | None = None
        self._log_start = 0

    @property
    def url(self) -> str:
        """Base address, without a trailing slash."""
        return f"http://{self.settings.host}:{self.port}"

    def start(self, on_wait: Callable[[float], None] | None = None) -> float:
        """Start the server and wait for it; returns the seconds it took. `on_wait(seconds)` is called about twice a
        second.

        Raises RolloutError with the last lines of the log when it ends or is not ready after `start_timeout_s`.
        """
        check_installation()
        started = time.monotonic()
        for attempt in range(3):
            self.port = choose_port(self.settings.port, self.settings.host)
            self._launch()
            if self._wait_ready(started, on_wait):
                return time.monotonic() - started
            # Somebody else may take a chosen port before the server binds it.
            taken = diagnosis.PORT_TAKEN in self.log_tail(200).lower()
            if self.settings.port is not None or attempt == 2 or not taken:
                break
        raise RolloutError(self._failure(f"the vLLM server {end_in_words(self.process.returncode)} while starting"))

    def _launch(self) -> None:
        """Start the guard, which starts vLLM."""
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-I", str(GUARD), str(os.getpid()), *server_command(self.settings, self.port)]
        with self.log_path.open("ab") as log:
            self._log_start = log.tell()
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=server_environment(self.settings, self.api_key),
                start_new_session=True,
            )
        atexit.register(self.stop)

    def _wait_ready(self, started: float, on_wait: Callable[[float], None] | None) -> bool:
        """True when /health answers, False when the process ended; RolloutError after the timeout."""
        while self.process.poll() is None:
            if self.healthy(timeout_s=2.0) and self._is_own():
                return True
            waited = time.monotonic() - started
            if waited > self.settings.start_timeout_s:
                self.stop()
                limit = f"{self.settings.start_timeout_s:g} s (worker.rollout.start_timeout_s)"
                raise RolloutError(self._failure(f"the vLLM server was not ready after {limit}"))
            if on_wait is not None:
                on_wait(waited)
            time.sleep(0.5)
        return False

    def healthy(self, timeout_s: float = 5.0) -> bool:
        """Whether the server answers /health now, which asks for no key."""
        return self._answers("/health", timeout_s, None)

    def _is_own(self) -> bool:
        """Whether what answers is the server that was started, and not one that took its port."""
        return self._answers(WEIGHTS_PATH, 10.0, self.api_key)

    def _answers(self, path: str, timeout_s: float, api_key: str | None) -> bool:
        try:
            return get(self.url + path, api_key, timeout_s).status_code == 200
        except requests.RequestException:
            return False

    def alive(self) -> bool:
        """Whether the process runs."""
        return self.process is not None and self.process.poll() is None

    def log_tail(self, lines: int = LOG_TAIL) -> str:
        """The last lines that this start has written to the log."""
        with self.log_path.open("rb") as log:
            log.seek(self._log_start)
            return "".join(deque((line.decode(errors="replace") for line in log), maxlen=lines))

    def _failure(self, what: str) -> str:
        """The message of a failed start: what happened, the likely remedy, the end of the log."""
        log, given = self.log_tail(LOG_READ), self.settings.engine_kwargs
        if refused := diagnosis.refused_argument(log, given):
            return refused
        remedy, error = diagnosis.likely_remedy(log, given), diagnosis.first_error(log)
        advice = f"Likely remedy: {remedy}." if remedy else "The lines below should say why."
        cause = f" First error: {error}" if error else ""
        return f"{what}. {advice}{cause}\nLast lines of {self.log_path}:\n{self.log_tail()}"

    def stop(self) -> None:
        """End all processes of the server: SIGTERM, SIGKILL after some seconds."""
        atexit.unregister(self.stop)
        if self.process is None:
            return
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()


class ExternalServer:
    """A server that somebody else started and stops (`python -m grpo_vlm.rollout.serve`), at `url`.

    It has VLLMServer's methods; `start` waits for it, and again after it went away.
    """

    process = None
    log_path = None

    def __init__(self, settings: ServerSettings, url: str, api_key: str) -> None:
        self.settings, self.url, self.api_key = settings, url.rstrip("/"), api_key

    def start(self, on_wait: Callable[[float], None] | None = None) -> float:
        """Wait until it answers, at most `start_timeout_s`, and see that it is what the trainer needs; returns the
        seconds. RolloutError otherwise."""
        started = time.monotonic()
        while not self.healthy(timeout_s=2.0):
            waited = time.monotonic() - started
            if waited > self.settings.start_timeout_s:
                raise RolloutError(
                    f"worker.rollout.base_url: no server answers at {self.url} after {self.settings.start_timeout_s:g}"
                    " s (worker.rollout.start_timeout_s); start it with `python -m grpo_vlm.rollout.serve`"
                )
            if on_wait is not None:
                on_wait(waited)
            time.sleep(0.5)
        self._check()
        return time.monotonic() - started

    def _check(self) -> None:
        """RolloutError when the key is another one, the server's context is too short, or it was started for whole
        models and the run sends adapters, or the other way round."""
        served = {model["id"]: model["max_model_len"] for model in self._ask("/v1/models")["data"]}
        longest = served.get(MODEL_NAME)
        if longest is None:
            raise RolloutError(
                f"the server at {self.url} serves {', '.join(served)}, not {MODEL_NAME!r}; start it with `python -m "
                "grpo_vlm.rollout.serve`"
            )
        if longest < self.settings.max_model_len:
            raise RolloutError(
                f"the server at {self.url} was started with worker.rollout.max_model_len {longest}; this run needs "
                f"{self.settings.max_model_len}"
            )
        if self._ask(WEIGHTS_PATH)["adapters"] is not bool(self.settings.lora_rank):
            kinds = ("whole models", "LoRA adapters")
            mine, other = kinds if not self.settings.lora_rank else kinds[::-1]
            raise RolloutError(
                f"the server at {self.url} was started for {other}, and this run sends {mine} "
                "(worker.actor.model.lora, worker.rollout.lora_sync); start it with this run's configuration"
            )

    def _ask(self, path: str) -> dict[str, Any]:
        """The JSON of one of the server's routes that need the key."""
        try:
            answer = get(self.url + path, self.api_key, 30.0)
            found = answer.json() if answer.status_code == 200 else None
        except requests.JSONDecodeError:
            raise RolloutError(f"what answers at {self.url}{path} is no rollout server: it sends no JSON") from None
        except requests.RequestException as error:
            raise RolloutError(f"the server at {self.url} broke off: {error}") from error
        if answer.status_code == 401:
            raise RolloutError(f"{KEY_VARIABLE} holds another key than the server at {self.url} was started with")
        if found is None:
            raise RolloutError(f"the server at {self.url} answers {path} with {answer.status_code}; is it ours?")
        return found

    _answers = VLLMServer._answers
    healthy = VLLMServer.healthy

    def alive(self) -> bool:
        """Always: that its process ended cannot be seen from here."""
        return True

    def log_tail(self, lines: int = LOG_TAIL) -> str:
        """Nothing: its log is not ours."""
        return ""

    def stop(self) -> None:
        """Nothing: it goes on for the next run."""


def loopback_session() -> requests.Session:
    """A session for requests to a rollout server: a proxy or .netrc of the environment must not see the traffic or
    the key."""
    session = requests.Session()
    session.trust_env = False
    return session


def get(url: str, api_key: str | None, timeout_s: float) -> requests.Response:
    """One GET, on a connection of its own, with the server's key if it is given."""
    headers = {"Connection": "close"} | ({} if api_key is None else {"Authorization": f"Bearer {api_key}"})
    with loopback_session() as session:
        return session.get(url, headers=headers, timeout=timeout_s)


def check_installation() -> None:
    """RolloutError when there is no vLLM of a known release, or it could not find our weight-transfer backends."""
    if problem := versions.problem(versions.installed()):
        raise RolloutError(problem)
    points = importlib.metadata.entry_points(group="vllm.general_plugins")
    if PLUGIN not in {point.name for point in points}:
        raise RolloutError(
            f"vLLM's plugin {PLUGIN} is not registered in this environment, so the server cannot take new weights. "
            "Install the package itself: pip install --no-deps -e . (or `make setup`)"
        )


def choose_port(wanted: int | None, host: str = "127.0.0.1") -> int:
    """A free port of this machine. RolloutError when the configured one is taken."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, wanted or 0))
        except OSError as error:
            raise RolloutError(
                f"worker.rollout.port: port {wanted} of {host} cannot be used ({error.strerror}). "
                "Set it to a free port, or to null to have one chosen"
            ) from error
        return probe.getsockname()[1]
