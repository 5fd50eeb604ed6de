"""What the processes of a run tell each other about errors, so that none waits for one that has ended."""

from typing import Any

from accelerate.utils import broadcast_object_list, gather_object

from grpo_vlm.errors import GRPOVLMError


def raise_everywhere(error: str | None, accelerator: Any, kind: type[GRPOVLMError]) -> None:
    """Raises `kind` on every rank when the main process gives an error; a collective."""
    message = [error]
    if accelerator.num_processes > 1:
        broadcast_object_list(message)
    if message[0] is not None:
        raise kind(message[0])


def raise_first(error: str | None, accelerator: Any, kind: type[GRPOVLMError]) -> None:
    """Raises `kind` on every rank when any of them gives an error: the first by rank; a collective."""
    messages = gather_object([error]) if accelerator.num_processes > 1 else [error]
    first = next((message for message in messages if message is not None), None)
    if first is not None:
        raise kind(first)
