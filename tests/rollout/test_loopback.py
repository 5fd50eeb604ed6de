"""Stores of torch.distributed that listen on loopback alone. (Those of a running server: test_faults.py.)"""

import importlib
import os

import psutil
import pytest
import torch.distributed as dist

from grpo_vlm.rollout.loopback import keep_stores_local
from grpo_vlm.rollout.server import choose_port


@pytest.fixture
def rendezvous(monkeypatch):
    module = importlib.import_module("torch.distributed.rendezvous")
    monkeypatch.setattr(module, "TCPStore", module.TCPStore)  # taken back afterwards
    keep_stores_local()
    return module.rendezvous


def listening(port):
    found = psutil.Process(os.getpid()).net_connections("inet")
    return [entry.laddr.ip for entry in found if entry.status == psutil.CONN_LISTEN and entry.laddr.port == port]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_store_works_and_listens_on_loopback_alone(rendezvous, host):
    port = choose_port(None)
    store, rank, world_size = next(rendezvous(f"tcp://{host}:{port}", 0, 1))
    client = dist.TCPStore("127.0.0.1", port, is_master=False)
    client.set("key", "value")
    assert store.get("key") == b"value" and (rank, world_size) == (0, 1)
    assert listening(port) == ["127.0.0.1"]
    with pytest.raises(dist.DistNetworkError, match="EADDRINUSE"):
        next(rendezvous(f"tcp://{host}:{port}", 0, 1))


def test_a_store_for_other_machines_is_torchs_own(rendezvous):
    port = choose_port(None)
    store, _, _ = next(rendezvous(f"tcp://0.0.0.0:{port}", 0, 1))
    store.set("key", "value")
    assert listening(port) in (["::"], ["0.0.0.0"])
