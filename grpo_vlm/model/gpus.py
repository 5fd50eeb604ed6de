"""GPUs by name: peak, memory and bandwidth, so that a run can be planned for a machine that is not this one."""

import re
from dataclasses import dataclass

import torch

from grpo_vlm.errors import ConfigError
from grpo_vlm.model.cost import CPU_TFLOPS, GENERIC_TFLOPS, PEAK_TFLOPS

# Memory in GB (1e9 bytes) as the driver reports it or the data sheet names it, bandwidth in TB/s by the data sheets,
# but for the H200: 150.1 and 4.3 were measured there.
MEMORY = {
    "NVIDIA H200": (150.1, 4.3),
    "NVIDIA GH200 480GB": (96.0, 4.0),
    "NVIDIA H100 80GB HBM3": (85.0, 3.35),
    "NVIDIA H100 PCIe": (85.0, 2.0),
    "NVIDIA H100 NVL": (100.0, 3.9),
    "NVIDIA H800": (85.0, 3.35),
    "NVIDIA H20": (102.0, 4.0),
    "NVIDIA B200": (191.0, 8.0),
    "NVIDIA A100-SXM4-40GB": (42.4, 1.56),
    "NVIDIA A100-SXM4-80GB": (85.0, 2.04),
    "NVIDIA A100-PCIE-40GB": (42.4, 1.56),
    "NVIDIA A100 80GB PCIe": (85.0, 1.94),
    "NVIDIA A800-SXM4-80GB": (85.0, 2.04),
    "NVIDIA A800 80GB PCIe": (85.0, 1.94),
    "NVIDIA A40": (47.6, 0.7),
    "NVIDIA A10": (23.7, 0.6),
    "NVIDIA A10G": (23.7, 0.6),
    "NVIDIA L40S": (47.7, 0.86),
    "NVIDIA L40": (47.7, 0.86),
    "NVIDIA L4": (23.7, 0.3),
    "NVIDIA RTX 6000 Ada Generation": (50.9, 0.96),
    "NVIDIA RTX A6000": (50.9, 0.77),
    "NVIDIA GeForce RTX 3090": (25.3, 0.94),
    "NVIDIA GeForce RTX 4090": (25.3, 1.01),
    "NVIDIA GeForce RTX 5090": (33.7, 1.79),
}
GENERIC_TB_S = 1.0  # an unknown accelerator
CPU_TB_S = 0.02
CPU = "CPU"


@dataclass(frozen=True)
class GPU:
    """One device. memory: bytes, None for a CPU, whose memory is the machine's. known: peak and bandwidth are its own,
    not a guess."""

    name: str
    memory: float | None
    peak_tflops: float
    bandwidth_tb_s: float
    known: bool = True

    @property
    def is_cpu(self) -> bool:
        return self.memory is None


def present() -> GPU:
    """The device that a run on this machine would use."""
    if not torch.accelerator.is_available():
        return GPU(CPU, None, CPU_TFLOPS, CPU_TB_S)
    device = torch.accelerator.current_accelerator()
    name = torch.get_device_module(device).get_device_name(0)
    _, total = torch.accelerator.get_memory_info(0)
    return GPU(
        name,
        float(total),
        PEAK_TFLOPS.get(name, GENERIC_TFLOPS),
        MEMORY[name][1] if name in MEMORY else GENERIC_TB_S,
        name in PEAK_TFLOPS,
    )


def named(text: str) -> GPU:
    """The listed GPU whose name has all words of `text`, in any case: "h200", "a100 80gb pcie". Raises ConfigError for
    one that is not listed, and for words that several have."""
    wanted = _words(text)
    found = [name for name in MEMORY if wanted and set(wanted) <= set(_words(name))]
    exact = [name for name in found if _words(name.removeprefix("NVIDIA ")) == wanted]
    if len(exact or found) != 1:
        which = f"{text!r} is one of {', '.join(found)}" if found else f"{text!r} is not known"
        raise ConfigError(f"--gpu: {which}; name one of: {', '.join(found or MEMORY)}")
    (name,) = exact or found
    memory_gb, bandwidth = MEMORY[name]
    return GPU(name, memory_gb * 1e9, PEAK_TFLOPS[name], bandwidth)


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.lower())
