"""A run ends with `accelerate launch`: that command hands no signal on to a single process, so that a scheduler's
SIGTERM, or the end of the launcher, would leave a trainer that nobody watches."""

import os
import signal

from grpo_vlm.rollout.guard import PR_SET_PDEATHSIG, tell_kernel

LAUNCHED = "ACCELERATE_MIXED_PRECISION"  # set by `accelerate launch` for all of its processes


def end_with_launcher() -> None:
    """Where `accelerate launch` has started this process, have the kernel send it SIGTERM when the launcher ends:
    the run then saves and stops (training/stop.py). Linux alone."""
    if LAUNCHED in os.environ:
        tell_kernel(PR_SET_PDEATHSIG, signal.SIGTERM)
