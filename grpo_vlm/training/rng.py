"""The states of all random number generators of a process, as JSON holds them."""

import base64
import random
from typing import Any

import numpy as np
import torch


def capture() -> dict[str, Any]:
    """Python's, numpy's, torch's, and the accelerator's where there is one."""
    kind, keys, *rest = np.random.get_state()
    found = {
        "python": list(random.getstate()),
        "numpy": [kind, keys.tolist(), *rest],
        "torch": _text(torch.get_rng_state()),
    }
    if torch.accelerator.is_available():
        found["device"] = _text(torch.get_device_module().get_rng_state())
    return found


def restore(found: dict[str, Any]) -> None:
    """Puts back what `capture` returned; the accelerator's where there is one and was one."""
    version, keys, gauss = found["python"]
    random.setstate((version, tuple(keys), gauss))
    kind, keys, *rest = found["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(_state(found["torch"]))
    if torch.accelerator.is_available() and "device" in found:
        torch.get_device_module().set_rng_state(_state(found["device"]))


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode("ascii")


def _state(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
