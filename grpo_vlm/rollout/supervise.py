"""What keeps a rollout going when its server does not: the server is watched while somebody waits for it, a failure is
judged, and the prompts that have no answer yet are known.

A leader is a rank with a server of its own (the main process; with a shared server, the first process of each node).
It alone judges and restarts; engine.py lets all ranks act on it together.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import requests

from grpo_vlm.errors import RolloutError
from grpo_vlm.rollout.client import VLLMClient
from grpo_vlm.rollout.failures import RequestRefused, RequestTimedOut, ServerGone, WeightsLost
from grpo_vlm.rollout.guard import descendants, end_in_words
from grpo_vlm.rollout.server import ExternalServer, VLLMServer, loopback_session
from grpo_vlm.rollout.types import Completion, Request

PROBE_PATH = "/is_sleeping"  # goes through the engine's own loop, which /health does not
PROBE_EVERY_S, PROBE_TIMEOUT_S = 2.0, 5.0
SILENT_PROBES = 4  # so many in a row without an answer, by a server that computes nothing: it hangs
FAILED_PROBES = 2  # so many in a row answered with an error: the engine is dead, the API process not yet
IDLE_SHARE = 0.1  # CPU seconds per second below which nothing is computed
SETTLE_S = 3.0  # an API process whose engine died answers for up to two seconds more
FREE_ROUNDS = 2  # rounds that may fail although the server is well; then it is restarted, once
NOTICE_S = 6.0  # its guard gives what is left of a server four seconds
SHOWN_ROWS = 5
DEAD_ENGINE = "the vLLM server's engine is dead (it answers {})"
# What a refusal says -> what to do about it.
REMEDIES = {
    "model length": "lower data.max_prompt_length, or raise worker.rollout.max_model_len",
    "context length": "lower data.max_prompt_length, or raise worker.rollout.max_model_len",
    "max_model_len": "lower data.max_prompt_length, or raise worker.rollout.max_model_len",
    "encoder cache": "raise worker.rollout.max_num_batched_tokens, or lower data.max_pixels",
    "At most": "raise worker.rollout.limit_images",
}


class Watchdog:
    """Looks after one server while somebody waits for it: `with watchdog: ...`. `fault` says what it found.

    A server that hangs is killed, so that the connections of all ranks break at once. It hangs when it answers no
    probe and uses no processor time: one in a long step (a first compilation, a large prefill on a CPU) is only busy.
    Somebody else's server is left alone; the requests' own time-outs apply.
    """

    silent_probes, probe_timeout_s = SILENT_PROBES, PROBE_TIMEOUT_S

    def __init__(self, server: VLLMServer | ExternalServer) -> None:
        self.server = server
        self.fault: str | None = None
        self._ended = threading.Event()

    def __enter__(self) -> Watchdog:
        self.fault, self._ended = None, threading.Event()
        if self.server.process is not None:
            threading.Thread(target=self._watch, args=(self._ended,), name="watchdog", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()  # not joined: a probe may take seconds

    def _watch(self, ended: threading.Event) -> None:
        silent = failed = 0
        while not ended.wait(PROBE_EVERY_S):
            if silent == 0:
                began, used_s = time.monotonic(), processor_seconds(self.server.process.pid)
            status = probe(self.server, self.probe_timeout_s)
            if ended.is_set():
                return
            if not self.server.alive():
                self.fault = ending(self.server.process)
                return
            waited_s = time.monotonic() - began
            idle = processor_seconds(self.server.process.pid) - used_s < IDLE_SHARE * waited_s
            silent = silent + 1 if status is None and idle else 0
            failed = failed + 1 if status not in (None, 200) else 0
            if silent >= self.silent_probes:
                self.fault = f"the vLLM server hangs (no answer and no work for {waited_s:.0f} s)"
            elif failed >= FAILED_PROBES:
                self.fault = DEAD_ENGINE.format(status)
            if self.fault is not None:
                kill(self.server.process)
                return

    def cause(self, message: str) -> str:
        """Why the server is not well: what was found out, or else what a request was told."""
        return self.fault or ending(self.server.process) or message

    def well(self) -> bool:
        """Whether the server still answers SETTLE_S seconds after something failed.

        Somebody else's never counts as well: it may have been started anew meanwhile, and then it has no weights.
        """
        if self.server.process is None:
            return False
        deadline = time.monotonic() + SETTLE_S
        while self.fault is None and self.server.alive():
            status = probe(self.server, self.probe_timeout_s)
            if status is None:
                break
            if status != 200:
                self.fault = DEAD_ENGINE.format(status)
            elif time.monotonic() > deadline:
                return True
            else:
                time.sleep(0.2)
        return False


def probe(server: VLLMServer | ExternalServer, timeout_s: float) -> int | None:
    """The status with which the server answers a question to its engine; None when it does not."""
    try:
        with loopback_session() as session:
            headers = {"Authorization": f"Bearer {server.api_key}", "Connection": "close"}
            return session.get(server.url + PROBE_PATH, headers=headers, timeout=timeout_s).status_code
    except requests.RequestException:
        return None


def ending(guard: subprocess.Popen[bytes] | None) -> str | None:
    """How a server ended, in words; None when it has not, after a moment in which its guard may notice."""
    if guard is None:
        return None
    try:
        code = guard.wait(NOTICE_S)
    except subprocess.TimeoutExpired:
        return None
    return f"the vLLM server {end_in_words(code)}"


def processor_seconds(root: int) -> float:
    """Processor time that the processes below `root` have used (Linux; 0 elsewhere)."""
    ticks = 0
    for pid in descendants(root):
        try:
            with open(f"/proc/{pid}/stat") as file:
                ticks += sum(map(int, file.read().rpartition(")")[2].split()[11:13]))
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended while we read
    return ticks / os.sysconf("SC_CLK_TCK")


def kill(guard: subprocess.Popen[bytes]) -> None:
    """SIGKILL to all processes of a server, stopped ones too; its guard then ends by itself.

    Python's resource trackers are spared: they remove the semaphores of the others, and end.
    """
    for pid in descendants(guard.pid):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                tracker = b"resource_tracker" in file.read()
            os.kill(pid, signal.SIGCONT if tracker else signal.SIGKILL)
        except (FileNotFoundError, ProcessLookupError):
            pass  # it ended by itself
    if guard.poll() is None:
        guard.send_signal(signal.SIGCONT)  # it may have been stopped with them
        return
    try:  # killed, so it could not take the others with it: they are in its process group
        os.killpg(guard.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # nothing is left


@dataclass(frozen=True)
class Report:
    """How one rank's attempt to get its answers went. It travels between ranks as a dict.

    failure: "" (all answered), "refused", "gone", "lost" (the server holds other weights), "timeout" (repeated: of a
    row that timed out before), "error".
    missing, rows: prompts without an answer, and the first of their ids. retries: prompts asked for again.
    """

    failure: str = ""
    message: str = ""
    status: int = 0
    repeated: bool = False
    missing: int = 0
    rows: tuple[str, ...] = ()
    retries: int = 0


class Job:
    """This rank's requests of one call, and the answers that have come. on_progress(done) counts prompts."""

    def __init__(self, batch: Sequence[Request], on_progress: Callable[[int], None] | None) -> None:
        self.batch, self.on_progress = batch, on_progress
        self.answers: dict[int, list[Completion]] = {}
        self.rounds = 0
        self.slow: set[str] = set()  # rows that timed out

    @property
    def missing(self) -> list[int]:
        """Indices of the requests without an answer."""
        return [index for index in range(len(self.batch)) if index not in self.answers]

    def attempt(self, client: VLLMClient, version: int, watch: Callable[[], None]) -> Report:
        """Ask for what is missing. A failure of the server is reported, not raised; what it answered is kept."""
        missing, before = self.missing, client.retries
        again = len(missing) if self.rounds else 0
        self.rounds += 1

        def take(index: int, completions: list[Completion]) -> None:
            self.answers[missing[index]] = completions
            if self.on_progress is not None:
                self.on_progress(len(self.answers))

        failed: dict[str, Any] = {}
        try:
            client.generate([self.batch[index] for index in missing], version, on_answer=take, watch=watch)
        except RolloutError as problem:
            failed = self._describe(problem)
        left = self.missing
        rows = tuple(self.batch[index].prompt.row_id for index in left[:SHOWN_ROWS])
        # The client's own attempts at a server that is gone reached nobody.
        tried = 0 if failed.get("failure") == "gone" else client.retries - before
        return Report(**failed, missing=len(left), rows=rows, retries=tried + again)

    def _describe(self, problem: RolloutError) -> dict[str, Any]:
        """The fields of a Report that tell one failure from another."""
        message = str(problem)
        match problem:
            case RequestRefused():
                return {"failure": "refused", "message": message, "status": problem.status}
            case ServerGone():
                return {"failure": "gone", "message": message}
            case WeightsLost():
                return {"failure": "lost", "message": message}
            case RequestTimedOut():
                repeated = problem.row_id in self.slow
                self.slow.add(problem.row_id)
                return {"failure": "timeout", "message": message, "repeated": repeated}
            case _:
                return {"failure": "error", "message": message}


@dataclass(frozen=True)
class Verdict:
    """What a leader has all ranks do: "done", "again" (ask for what is missing), "restart" its server, "raise"."""

    action: str
    message: str = ""


def judge(reports: Sequence[Report], well: Callable[[], bool], failed_rounds: int) -> Verdict:
    """The verdict on the reports of the ranks that use one server.

    well(): whether the server answers; asked only where it matters, because that takes seconds. failed_rounds: how
    often this call was tried in vain before.
    """
    failed = [report for report in reports if report.failure]
    if not failed:
        return Verdict("done")
    for report in failed:
        if report.failure == "error" or report.repeated or 0 < report.status < 500:
            return Verdict("raise", report.message + remedy(report.message))
    helped = [report for report in failed if report.failure in ("timeout", "lost")]  # by a new server, or a sync
    if helped:
        return Verdict("restart", helped[0].message)
    if not well():
        return Verdict("restart", failed[0].message)
    refused = [report for report in failed if report.failure == "refused"]
    if refused:
        return Verdict("raise", refused[0].message)
    if failed_rounds > FREE_ROUNDS:
        return Verdict("raise", failed[0].message)
    return Verdict("again" if failed_rounds < FREE_ROUNDS else "restart", failed[0].message)


def agree(verdicts: Sequence[Verdict]) -> str:
    """The one action of all ranks, given the verdicts of all leaders."""
    actions = {verdict.action for verdict in verdicts}
    return next(action for action in ("raise", "restart", "again", "done") if action in actions)


def remedy(message: str) -> str:
    """What to do about a refusal, where that is known."""
    advice = next((text for sign, text in REMEDIES.items() if sign.lower() in message.lower()), None)
    return f". Remedy: {advice}" if advice else ""
