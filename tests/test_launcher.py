"""A run does not outlive `accelerate launch`."""

import os
import signal
import subprocess
import sys

import pytest

CHILD = """
import signal, sys, time
from grpo_vlm.launcher import end_with_launcher
signal.signal(signal.SIGTERM, lambda *_: (print("told", flush=True), sys.exit()))
end_with_launcher()
print("up", flush=True)
time.sleep(20)
"""
LAUNCHER = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux tells")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_end_of_the_launcher_is_a_sigterm(number):
    environment = os.environ | {"ACCELERATE_MIXED_PRECISION": "no"}
    command = [sys.executable, "-c", LAUNCHER, CHILD]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout.readline() == "up\n"
        launcher.send_signal(number)
        assert launcher.stdout.readline() == "told\n"
