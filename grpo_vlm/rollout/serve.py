"""A rollout server that outlives runs, for `worker.rollout.placement: external`:

    export GRPO_VLM_ROLLOUT_KEY=$(python -c 'import secrets; print(secrets.token_urlsafe(32))')
    python -m grpo_vlm.rollout.serve --config run.yaml worker.rollout.port=8000     # one terminal
    accelerate launch ... train.py --config run.yaml worker.rollout.placement=external \\
        worker.rollout.base_url=http://127.0.0.1:8000                               # another one

It reads the run's own configuration, so that both agree on model, lengths and types, uses all visible GPUs, and starts
without weights: the run brings them. It runs until it is interrupted; vLLM's output goes to --log.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import signal
import sys
import time
from collections.abc import Sequence
from urllib.parse import urlsplit

from grpo_vlm.cli import guarded
from grpo_vlm.config.check import check_values
from grpo_vlm.config.check_batch import length_faults
from grpo_vlm.config.check_files import expand_paths, file_faults, port_faults, required_faults
from grpo_vlm.config.check_rollout import engine_kwargs_faults, key_problem
from grpo_vlm.config.faults import raise_faults
from grpo_vlm.config.load import read_config
from grpo_vlm.config.schema import Config
from grpo_vlm.config.values import KEY_VARIABLE
from grpo_vlm.errors import ConfigError

PORT = 8000


def read_settings(path: str | None, overrides: Sequence[str]) -> Config:
    """The parts of a run's configuration that its server needs, checked. ConfigError lists all faults."""
    config, faults, _ = read_config(path, overrides)
    rollout = config.worker.rollout
    rollout.name, rollout.placement, rollout.gpus = "vllm", "external", []
    if rollout.port is None:
        rollout.port = urlsplit(rollout.base_url or "").port or PORT
    faults += check_values(config)[0] + length_faults(config) + engine_kwargs_faults(rollout.engine_kwargs)
    without_rows = {"needs_reward": False, "needs_train_files": False, "has_val_rows": True}
    faults += required_faults(config, **without_rows) + file_faults(config, **without_rows)
    raise_faults(faults + port_faults(config, external=True))
    expand_paths(config)
    return config


def read_key() -> str:
    """The key that the trainer will give. ConfigError when there is none."""
    if problem := key_problem():
        raise ConfigError(
            f"{KEY_VARIABLE}: {problem}; set it here and for the run: "
            f"export {KEY_VARIABLE}=$(python -c 'import secrets; print(secrets.token_urlsafe(32))')"
        )
    return os.environ[KEY_VARIABLE]


def serve(config: Config, host: str, log_path: str, key: str) -> int:
    """Start the server and wait until it ends or this process is told to. Returns the exit code."""
    import torch

    from grpo_vlm.rollout.command import server_settings
    from grpo_vlm.rollout.server import VLLMServer

    available = torch.accelerator.is_available()
    device = torch.accelerator.current_accelerator().type if available else "cpu"
    settings = server_settings(config, device, torch.accelerator.device_count() if available else 1)
    server = VLLMServer(dataclasses.replace(settings, host=host), log_path, key)
    stopped: list[int] = []
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda received, frame: stopped.append(received))

    def look(waited_s: float) -> None:
        if stopped:
            raise KeyboardInterrupt

    try:
        print(f"starting the vLLM server, log in {log_path} ...", flush=True)
        seconds = server.start(look)
        print(f"ready at {server.url} after {seconds:.0f} s", flush=True)
        while server.alive() and not stopped:
            time.sleep(0.2)
    except KeyboardInterrupt:
        stopped.append(signal.SIGINT)
    finally:
        server.stop()
    if not stopped:
        print(f"the vLLM server has ended; last lines of {log_path}:\n{server.log_tail()}", file=sys.stderr)
    return 0 if stopped else 1


def main(arguments: Sequence[str]) -> int:
    """Parse -> check -> serve. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m grpo_vlm.rollout.serve",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE", help="the run's configuration")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; the traffic is not encrypted")
    parser.add_argument("--log", metavar="FILE", default="vllm.log", help="where vLLM's output goes")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    given = parser.parse_intermixed_args(arguments)
    config = read_settings(given.config, given.overrides)
    return serve(config, given.host, given.log, read_key())


if __name__ == "__main__":
    sys.exit(guarded(main, sys.argv[1:]))
