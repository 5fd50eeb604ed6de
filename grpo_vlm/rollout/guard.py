"""Runs the vLLM server as a child and takes all of its processes down as soon as the trainer is gone, also after kill
-9.

Started by server.py as a file, so that it imports the standard library alone: `python -I guard.py TRAINER_PID
COMMAND...`. vLLM is a tree of processes. The guard declares itself their reaper, so that an orphan of any depth
becomes its child and is found in /proc, whatever process group it moved to. A guard that was stopped is woken by the
trainer's end. When the guard itself is killed, the kernel kills its child with it, and lifeline.py has it do so all
the way down.
"""

import ctypes
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

POLL_S = 0.25
GRACE_S = 4.0
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
GUARDED = "GRPO_VLM_GUARDED"  # set in the environment of the processes below a guard
SOCKETS = "grpo_vlm_sockets-"  # start of the name of a server's folder


def tell_kernel(option: int, value: int) -> None:
    """Linux process control; on other systems the guard still stops the process group."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def die_with(parent: int) -> None:
    """Have the kernel kill this process when the thread that made it ends, which must be the main thread of process
    `parent`; at once if that is over already."""
    tell_kernel(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


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


def end_in_words(code: int) -> str:
    """How a server ended, by the exit code of its guard: that of the server, which the guard passes on, or its own.
    That of a signal is negative, and reaches others as 256 less."""
    if 0 <= code <= 224:
        return f"ended with exit code {code}"
    return f"was killed by {signal.Signals(-code if code < 0 else 256 - code).name}"


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


@contextmanager
def socket_folder() -> Iterator[str]:
    """A folder for vLLM's sockets, which it leaves where it made them; locked as long as this process lives."""
    while True:
        path = tempfile.mkdtemp(prefix=SOCKETS)
        try:
            lock = os.open(path, os.O_RDONLY)
        except FileNotFoundError:  # another guard took it for a left one
            continue
        if _locks(lock) and os.path.isdir(path):
            break
        os.close(lock)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def remove_left_folders() -> None:
    """Remove the folders of guards that were killed. A lock tells, not a process id: containers may share /tmp."""
    for path in Path(tempfile.gettempdir()).glob(f"{SOCKETS}*"):
        try:
            lock = os.open(path, os.O_RDONLY)
        except OSError:  # another user's, or gone meanwhile
            continue
        if _locks(lock):
            shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def _locks(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def main(trainer_pid: int, command: list[str]) -> int:
    """Guard `command` until it ends, SIGTERM arrives, or the trainer is no longer this process's parent. Returns the
    exit code of what ended; that of a signal is negative."""
    tell_kernel(PR_SET_CHILD_SUBREAPER, 1)
    # Stopped, it could not see the trainer's end. This signal wakes it then, and otherwise does nothing.
    tell_kernel(PR_SET_PDEATHSIG, signal.SIGCONT)
    stopping: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda received, frame: stopping.append(received))
    remove_left_folders()
    own_pid = os.getpid()
    with socket_folder() as sockets:
        environment = os.environ | {"VLLM_RPC_BASE_PATH": sockets, GUARDED: "1"}
        server = subprocess.Popen(command, env=environment, preexec_fn=lambda: die_with(own_pid))
        while server.poll() is None and not stopping and os.getppid() == trainer_pid:
            time.sleep(POLL_S)
        end_tree(GRACE_S)
    if server.returncode is not None:
        return server.returncode
    return -stopping[0] if stopping else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
