"""Which way the weights take, by where the server runs."""

from pathlib import Path
from typing import Any

import torch

from grpo_vlm.config.check_rollout import is_loopback
from grpo_vlm.rollout.client import VLLMClient
from grpo_vlm.rollout.command import ServerSettings
from grpo_vlm.rollout.sync import FileSync, WeightSync
from grpo_vlm.rollout.sync_adapter import AdapterSync
from grpo_vlm.rollout.sync_packed import IPCSync, NCCLSync


def make_sync(settings: ServerSettings, client: VLLMClient | None, accelerator: Any, run_dir: Path) -> WeightSync:
    """The transfer for a server with these settings. client: a leader's; None on the other ranks."""
    dtype = getattr(torch, settings.dtype)
    here = settings.placement != "external" or (client is not None and is_loopback(client.url))
    if settings.lora_rank:
        return AdapterSync(client, accelerator, dtype, run_dir, here)
    if settings.backend == FileSync.backend:
        return FileSync(client, accelerator, dtype, run_dir, here)
    kind = IPCSync if settings.backend == IPCSync.backend else NCCLSync
    return kind(client, accelerator, dtype)
