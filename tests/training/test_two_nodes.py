"""Two machines: two network namespaces joined by a cable, each with its own `accelerate launch` of
accelerate_configs/two_nodes.yaml, lead where one machine with two processes leads."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.training.test_sharding import ROOT, assert_in_force, difference, run

ADDRESSES = ("10.231.77.1", "10.231.77.2")
PORT = "29533"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def nodes() -> Iterator[list[tuple[str, str]]]:
    """(namespace, its interface) of two nodes."""
    made = [(f"grpo{os.getpid()}n{number}", f"g{os.getpid()}n{number}") for number in range(2)]
    try:
        for space, _ in made:
            ip("netns", "add", space)
        ip("link", "add", made[0][1], "type", "veth", "peer", "name", made[1][1])
        for (space, cable), address in zip(made, ADDRESSES, strict=True):
            ip("link", "set", cable, "netns", space)
            ip("-n", space, "addr", "add", f"{address}/24", "dev", cable)
            for name in (cable, "lo"):
                ip("-n", space, "link", "set", name, "up")
        yield made
    finally:
        for space, _ in made:
            subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="making network namespaces and a cable between them needs root")
def test_two_nodes_lead_where_one_leads(tmp_path: Path, nodes: list[tuple[str, str]]) -> None:
    """ZeRO-3, bit for bit."""
    alone = run(tmp_path, "qwen2_5_vl", "whole", ("zero3",))["zero3"]["ranks"]
    started = []
    for rank, (space, cable) in enumerate(nodes):
        command = ["ip", "netns", "exec", space, sys.executable, "-m", "accelerate.commands.launch"]
        command += ["--config_file", str(ROOT / "accelerate_configs/two_nodes.yaml"), "--num_processes", "2"]
        command += ["--machine_rank", str(rank), "--main_process_ip", ADDRESSES[0], "--main_process_port", PORT, "-m"]
        command += ["tests.training.sharded", str(tmp_path), "qwen2_5_vl", "whole", "1", "two_nodes"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": cable}
        started.append(
            subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        )
    texts = [process.communicate(timeout=250)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], "\n".join(texts)[-5000:]
    ranks = torch.load(tmp_path / "two_nodes.pt", weights_only=False)["ranks"]
    assert_in_force("zero3", ranks)
    assert [seen["machines"] for seen in ranks] == [2, 2]
    assert difference(alone[0]["after"], ranks[0]["after"]) == 0.0
