"""Runs the vLLM server as a child and takes all of its processes down as soon as the trainer is gone, also after kill
-9.

Started by server.py as a file, so that it imports the standard library alone: `python -I guard.py TRAINER_PID
COMMAND...`. vLLM is a tree of processes. The guard declares itself their reaper, so that an orphan of any depth
becomes its child and is found in /proc, whatever process group it moved to.
"""

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time

POLL_S = 0.25
GRACE_S = 4.0
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def _prctl(option: int, value: int) -> None:
    """Linux process control; on other systems the guard still stops the process group."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def descendants(root: int) -> list[int]:
    """Process ids below `root`, from /proc."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc") if os.path.isdir("/proc") else []:
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat") as file:
                    parent = int(file.read().rpartition(")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):  # it ended while we read
                continue
            children.setdefault(parent, []).append(int(entry))
    found, queue = [], [root]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return found


def _signal_all(pids: list[int], number: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass  # it ended by itself


def _reap() -> None:
    """Collect ended children, so that they do not count as living ones."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass  # none is left


def end_tree(grace_s: float) -> None:
    """SIGTERM to everything below this process, SIGKILL to what still lives after `grace_s` seconds."""
    deadline = time.monotonic() + grace_s
    _signal_all(descendants(os.getpid()), signal.SIGTERM)
    while descendants(os.getpid()) and time.monotonic() < deadline:
        time.sleep(0.05)
        _reap()
    while alive := descendants(os.getpid()):
        _signal_all(alive, signal.SIGKILL)
        time.sleep(0.02)
        _reap()


def main(trainer_pid: int, command: list[str]) -> int:
    """Guard `command` until it ends, SIGTERM arrives, or the trainer is no longer this process's parent."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    stopping = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda received, frame: stopping.append(received))
    with tempfile.TemporaryDirectory(prefix="grpo_vlm-") as sockets:  # vLLM leaves its sockets where it made them
        environment = os.environ | {"VLLM_RPC_BASE_PATH": sockets}
        on_death = lambda: _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # noqa: E731
        server = subprocess.Popen(command, env=environment, preexec_fn=on_death)
        while server.poll() is None and not stopping and os.getppid() == trainer_pid:
            time.sleep(POLL_S)
        end_tree(GRACE_S)
    return server.returncode if server.returncode is not None else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
