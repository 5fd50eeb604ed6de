"""Keeps torch.distributed's stores in the processes of a vLLM server on the loopback address.

A TCPStore listens on every address of the machine, whatever host it is told, and takes and gives values without asking
who is there. vLLM 0.26 opens one in each engine (0.31 uses a file there), and all releases do for mixtures of experts
on several engines. A store takes a socket that listens already, so it is given one that is bound to the host it was
told.
"""

from __future__ import annotations

import errno
import importlib
import socket
from typing import Any

import torch.distributed as dist

from grpo_vlm.config.check_rollout import is_loopback_host


def keep_stores_local() -> None:
    """Have stores with a loopback address listen on that address alone. Called in each process of a guarded
    server (lifeline.py)."""
    rendezvous = importlib.import_module("torch.distributed.rendezvous")  # the attribute of this name is a function
    rendezvous.TCPStore = local_store


def local_store(host_name: str, port: int, *, is_master: bool, **options: Any) -> dist.TCPStore:
    """A TCPStore. torch.distributed.DistNetworkError when the port is taken, as from TCPStore itself."""
    options |= {"host_name": host_name, "port": port, "is_master": is_master}
    if not is_master or not is_loopback_host(host_name):
        return dist.TCPStore(**options)
    try:
        family = socket.AF_INET6 if ":" in host_name else socket.AF_INET
        listener = socket.create_server((host_name, port), family=family, backlog=socket.SOMAXCONN)
    except OSError as error:
        name = errno.errorcode[error.errno]  # vLLM looks for it
        raise dist.DistNetworkError(f"{name}: cannot listen on {host_name}, port {port}") from error
    return dist.TCPStore(**options, master_listen_fd=listener.detach())
