"""The engine that is a vLLM server: started, given the weights, watched, started again, and stopped."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from grpo_vlm.config import Config
from grpo_vlm.config.values import KEY_VARIABLE
from grpo_vlm.errors import RolloutError
from grpo_vlm.rollout.client import VLLMClient
from grpo_vlm.rollout.command import ignored_on_cpu, server_settings
from grpo_vlm.rollout.failures import ServerGone
from grpo_vlm.rollout.ranks import Meeting, processes_here
from grpo_vlm.rollout.server import ExternalServer, VLLMServer
from grpo_vlm.rollout.supervise import SHOWN_ROWS, Job, Report, Verdict, Watchdog, agree, ending, judge, kill
from grpo_vlm.rollout.sync import SHARED_MEMORY, WeightSync, remove_left_folders
from grpo_vlm.rollout.sync_choice import make_sync
from grpo_vlm.rollout.types import Completion, Request, banned_token_ids, eos_token_ids

MARGIN_S = 120.0  # beyond its own time-outs, what a rank may take before the others give it up


def print_warning(text: str) -> None:
    """What is said where no console is given."""
    print(f"warning: {text}", file=sys.stderr)


class VLLMEngine:
    """A vLLM server that a leading rank starts, feeds with weights, watches and stops; every rank sends its own
    prompts to it.

    A server that dies or hangs is started again, at most `worker.rollout.max_restarts` times in a run, and given the
    current weights; only prompts without an answer are asked for again, with their seeds. Ranks that have theirs wait
    for the others in a Meeting, so that all of them take part when weights are gathered anew.

    warn(text): called on the main process when that happens. on_wait(seconds): while a server starts.
    """

    name = "vllm"

    def __init__(
        self,
        config: Config,
        *,
        processor: Any,
        model: nn.Module,
        accelerator: Any,
        run_dir: Path,
        warn: Callable[[str], None] = print_warning,
        on_wait: Callable[[float], None] | None = None,
    ) -> None:
        self.accelerator, self.processor, self.warn, self.on_wait = accelerator, processor, warn, on_wait
        self.run_dir = run_dir
        self.rollout = rollout = config.worker.rollout
        self.request_timeout_s, self.step_timeout_s = rollout.request_timeout_s, rollout.step_timeout_s
        self.max_restarts = rollout.max_restarts
        self.settings = server_settings(config, accelerator.device.type, processes_here(accelerator))
        unwrapped = accelerator.unwrap_model(model)
        self.banned_ids = banned_token_ids(processor, unwrapped.config)
        self.eos_ids = eos_token_ids(processor, unwrapped.generation_config)
        self.meeting = Meeting(accelerator)
        # The rank whose server this rank uses: a shared one runs on the GPUs of each node.
        shared = rollout.placement == "shared"
        self.leader = accelerator.process_index - accelerator.local_process_index if shared else 0
        self.leads = accelerator.process_index == self.leader
        self.followers: list[int] = []  # the ranks that use this rank's server
        self.server: VLLMServer | ExternalServer | None = None  # a leader's
        self.watchdog: Watchdog | None = None
        self.client: VLLMClient | None = None
        self.transfer: WeightSync | None = None
        self.model, self.version = model, -1
        self.asleep = False
        self.restarts = 0  # of all servers, so far
        self.servers = 1  # server processes that weights were sent to, so far; a probe looks at each
        self.nonce = ""  # of this run's names of weights
        self._new = False  # a leader's server does not know yet how weights will come
        self._sleeping: list[str] = []  # parts of a leader's server that are still asleep
        self._counts = {"rollout/restarts": 0, "rollout/retries": 0}

    # ---- what the trainer calls

    def start(self) -> None:
        """Start the server on its leader and tell every rank where it is."""
        if self.leads:
            if self.settings.device == "cpu":
                remove_left_folders(SHARED_MEMORY, self.run_dir)
                if ignored := ignored_on_cpu(self.rollout):
                    self._say(f"the vLLM server on a CPU ignores {', '.join(ignored)}")
            self.server = self._make_server()
            self.watchdog = Watchdog(self.server)
        faults, _, where = self._launch(self.leads)
        if faults:
            raise RolloutError(faults[0])
        self.client = VLLMClient(
            *where,
            tokenizer=self.processor.tokenizer,
            eos_ids=self.eos_ids,
            banned_ids=self.banned_ids,
            request_timeout_s=self.request_timeout_s,
            pixel_dtype=getattr(torch, self.settings.dtype),
        )
        self.transfer = make_sync(self.settings, self.client if self.leads else None, self.accelerator, self.run_dir)
        self.client.adapter = self.transfer.adapter
        self.nonce = self.meeting.exchange(self.transfer.run, limit_s=MARGIN_S, what="start")[self.leader]
        self._new = self.leads

    def sync(self, model: nn.Module, version: int) -> dict[str, float]:
        """Wake the server if it sleeps, transfer the weights, drop its caches; a fallen server is started again."""
        self.model, self.version = model, version
        self.client.weights = f"{self.run_dir.name} ({self.nonce}), version {version}"
        self._make_room()
        while True:
            metrics, problem = self._send()
            if problem is None:
                self.asleep = False
                return metrics
            verdict = Verdict("done")
            if self.leads:
                well = self.watchdog.well() and self.transfer.reaches_same()
                verdict = Verdict("raise", problem) if well else Verdict("restart", self.watchdog.cause(problem))
            self._act(verdict)

    def generate(
        self, requests: Sequence[Request], on_progress: Callable[[int], None] | None = None
    ) -> list[list[Completion]]:
        """See Engine. A failure on any rank that nothing helps against is raised on all of them, naming the row."""
        if self.asleep:  # released, and the weights have not moved since: bring the same ones back
            self.sync(self.model, self.version)
        job, deadline, failed_rounds = Job(requests, on_progress), time.monotonic() + self.step_timeout_s, 0
        while True:
            reports = self._round(job, deadline)
            verdict = Verdict("done")
            if self.leads:
                mine = [reports[rank] for rank in self.followers]
                verdict = judge(mine, self.watchdog.well, failed_rounds)
                if verdict.action == "restart":
                    verdict = Verdict("restart", self.watchdog.cause(verdict.message))
            action = self._act(verdict, reports)
            if action == "done":
                return [job.answers[index] for index in range(len(requests))]
            failed_rounds += 1
            if action == "restart":
                self.sync(self.model, self.version)

    def metrics(self) -> dict[str, float]:
        """Restarts of the server and prompts asked for again, by all ranks, since the last call."""
        taken, self._counts = self._counts, dict.fromkeys(self._counts, 0)
        return {name: float(count) for name, count in taken.items()}

    def release(self) -> None:
        """Put the server to sleep until the next sync. (`generate` has ended on all ranks when it ends on one.)"""
        if not self.settings.sleeps or self.asleep:
            return
        with self._watched():
            self._on_leaders(self._sleep)
        if self.transfer.sleep_level > 1:
            self.transfer.forget()
        self.asleep = True

    def close(self) -> None:
        """Stop the server."""
        if self.server is not None:
            self.server.stop()
            self.server = None

    # ---- what all ranks do together

    def _launch(self, mine: bool) -> tuple[list[str], bool, tuple[str, str]]:
        """Start the servers of the leaders with `mine`. Returns what went wrong, whether that was this rank's server,
        and the address and key of the server that this rank uses."""
        problem = None
        if mine:
            try:
                self.server.start(self.on_wait)
            except RolloutError as error:
                problem = str(error)
        where = (self.server.url, self.server.api_key) if self.leads else (None, None)
        limit_s = self.settings.start_timeout_s + MARGIN_S
        told = self.meeting.exchange([self.leader, problem, *where], limit_s=limit_s, what="start the vLLM server")
        self.followers = [rank for rank, (leader, *_) in enumerate(told) if leader == self.meeting.rank]
        faults = [fault for _, fault, _, _ in told if fault is not None]
        return faults, problem is not None, tuple(told[self.leader][2:])

    def _send(self) -> tuple[dict[str, float], str | None]:
        """One transfer of all weights. Returns its metrics and, on all ranks alike, what went wrong."""
        try:
            with self._watched():
                if others := self._on_leaders(self._prepare):
                    self._counts["rollout/restarts"] += others
                    self.servers += others
                metrics = self.transfer.send(self.model)
                self._on_leaders(self._name_weights)
        except RolloutError as problem:
            return {}, str(problem)
        return metrics, None

    def _round(self, job: Job, deadline: float) -> list[Report]:
        """Ask for what is missing, and wait until the other ranks have theirs. Returns the reports of all ranks."""
        with self._watched():
            report = job.attempt(self.client, self.version, lambda: self._look(job, deadline))
            limit_s = max(0.0, deadline - time.monotonic()) + MARGIN_S
            told = self.meeting.exchange(asdict(report), limit_s=limit_s, what="get the answers to its prompts")
        reports = [Report(**values) for values in told]
        self._counts["rollout/retries"] += sum(report.retries for report in reports)
        return reports

    def _act(self, verdict: Verdict, reports: Sequence[Report] = ()) -> str:
        """Do what the leaders' verdicts come to: raise, start servers again, or nothing. Returns the action."""
        told = self.meeting.exchange(asdict(verdict), limit_s=MARGIN_S, what="judge the vLLM server")
        action = agree(verdicts := [Verdict(**values) for values in told])
        causes = [each.message for each in verdicts if each.action == action]
        if action == "raise":
            raise RolloutError(causes[0])
        if action == "restart":
            self._restart(causes, verdict.action == "restart", reports)
        return action

    def _restart(self, causes: list[str], mine: bool, reports: Sequence[Report]) -> None:
        """Start the fallen servers again, this rank's own one if `mine`. RolloutError when restarts are used up."""
        began, fell = time.monotonic(), mine
        while causes:
            if self.restarts + len(causes) > self.max_restarts:
                raise RolloutError(self._used_up(causes[0], reports))
            self.restarts += len(causes)
            self._counts["rollout/restarts"] += len(causes)
            what = "waited for" if self.rollout.placement == "external" else "started again"
            self._say(
                f"{causes[0].splitlines()[0]}. It is {what} (restart {self.restarts} of at most {self.max_restarts} "
                "in a run) and given all weights; every process waits for it"
            )
            if self.accelerator.device.type != "cpu":
                torch.accelerator.empty_cache()  # the server finds no room in what the trainer only keeps at hand
            if mine and self.server.process is not None:
                kill(self.server.process)
            if mine:
                self.server.stop()
            causes, mine, where = self._launch(mine)
        self.client.connect(*where)
        self.servers += 1
        if fell:
            self._new, self._sleeping = True, []
        missing = sum(report.missing for report in reports)
        again = f"; {missing} prompt(s) are asked again" if missing else ""
        self._say(f"the vLLM server is back after {time.monotonic() - began:.0f} s{again}")

    def _on_leaders(self, call: Callable[[], int | None]) -> int:
        """`call` on the leaders; the sum of what it counts. RolloutError on all ranks when it fails on one."""
        problem = count = None
        if self.leads:
            try:
                count = call()
            except RolloutError as error:
                problem = str(error)
        told = self.meeting.exchange(
            [problem, count], limit_s=self.request_timeout_s + MARGIN_S, what="control the vLLM server"
        )
        if faults := [fault for fault, _ in told if fault is not None]:
            raise RolloutError(faults[0])
        return sum(each or 0 for _, each in told)

    # ---- what one rank does

    def _make_server(self) -> VLLMServer | ExternalServer:
        """The server of a leader, not started."""
        if self.rollout.placement == "external":
            return ExternalServer(self.settings, self.rollout.base_url, os.environ[KEY_VARIABLE])
        name = f"vllm-{self.leader}.log" if self.leader else "vllm.log"  # one per node, in a folder that they share
        return VLLMServer(self.settings, self.run_dir / name)

    def _watched(self) -> AbstractContextManager[Any]:
        """A leader looks after its server while the block runs."""
        return self.watchdog if self.leads else nullcontext()

    def _prepare(self) -> int:
        """Before a transfer. Returns 1 when the server is another one than before. ServerGone when there is none."""
        if not self.server.alive():
            raise ServerGone(ending(self.server.process))
        if self._new:
            self.transfer.connect()
            self._new = False
        self._wake("weights")
        if self.transfer.begin():
            return 0
        self._say(
            f"the vLLM server at {self.client.url} does not hold the weights that it was sent last: it was started "
            "again, or another run uses it. It is given all weights"
        )
        return 1

    def _name_weights(self) -> None:
        """After a transfer: the server's caches are made, and it knows what it holds."""
        self._wake("kv_cache")
        self.transfer.end(self.client.weights)

    def _sleep(self) -> None:
        """Put the server to sleep. The next sync finds one that is gone, and starts it again."""
        with suppress(ServerGone):
            self.client.post("/sleep", level=self.transfer.sleep_level)
            self._sleeping = ["weights", "kv_cache"]

    def _wake(self, part: str) -> None:
        """Bring a part of the server back, if it sleeps."""
        if part in self._sleeping:
            self.client.post("/wake_up", tags=part)
            self._sleeping.remove(part)

    def _make_room(self) -> None:
        """Give back what torch's allocator only keeps at hand, where a server that is to wake would not find its
        share of the accelerator free. (Always giving it back would cost each step the time to get it again.)"""
        if not self.asleep or self.accelerator.device.type == "cpu":
            return
        free, total = torch.accelerator.get_memory_info(self.accelerator.device)
        if free < self.rollout.gpu_memory_utilization * total:
            torch.accelerator.empty_cache()

    def _look(self, job: Job, deadline: float) -> None:
        """Called while this rank's prompts wait: raises when they wait in vain."""
        if self.leads and self.watchdog.fault is not None:
            raise ServerGone(self.watchdog.fault)
        if time.monotonic() > deadline:
            rows = [job.batch[index].prompt.row_id for index in job.missing]
            raise RolloutError(
                f"row {rows[0]}: no answer when the step's time was over; {len(rows)} of {len(job.batch)} prompts had "
                f"none after {self.step_timeout_s:g} s (worker.rollout.step_timeout_s). Raise it, or lower "
                "data.max_response_length"
            )

    def _say(self, text: str) -> None:
        if self.accelerator.is_main_process:
            self.warn(text)

    def _used_up(self, cause: str, reports: Sequence[Report]) -> str:
        """The message of the last failure."""
        rows = [row for report in reports for row in report.rows]
        waiting = f" Rows without an answer: {', '.join(rows[:SHOWN_ROWS])}." if rows else ""
        tail = ""
        if isinstance(self.server, VLLMServer) and "Last lines of" not in cause:
            tail = f"\nLast lines of {self.server.log_path}:\n{self.server.log_tail()}"
        return (
            f"{cause}. It is not started again: worker.rollout.max_restarts is {self.max_restarts} and "
            f"{self.restarts} are used.{waiting} Remedy: vllm.log should say why it fell; where one prompt fells it "
            f"again and again take that row out, where memory ran out lower gpu_memory_utilization. The same command "
            f"goes on from the last checkpoint{tail}"
        )
