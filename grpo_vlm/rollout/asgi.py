"""Bodies in and whole answers out of an ASGI route."""

from __future__ import annotations

import json
from typing import Any


async def read_body(headers: dict[bytes, bytes], receive: Any) -> bytearray:
    """The whole body, in one piece of memory of the announced size."""
    body = bytearray(int(headers.get(b"content-length", 0)))
    used, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return body  # what is there cannot be decoded
        part = message.get("body", b"")
        body[used : used + len(part)] = part
        used += len(part)
        more = message.get("more_body", False)
    return body


async def disconnected(receive: Any) -> None:
    """Returns when the client has closed its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def refuse(send: Any, status: int, reason: str) -> None:
    """A whole answer that is an error, in the form of vLLM's own."""
    await reply(send, status, {"error": {"message": reason}})


async def reply(send: Any, status: int, values: dict[str, Any]) -> None:
    """A whole answer in JSON."""
    body = json.dumps(values).encode()
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", b"application/json")]})
    await send({"type": "http.response.body", "body": body})
