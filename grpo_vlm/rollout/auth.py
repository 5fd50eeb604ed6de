"""What keeps a vLLM server to itself: every path but /health needs the API key, and no pictures get into its log.

vLLM itself asks for the key on /v1 only. Its development routes (sleep, weight transfer, collective calls) change the
model and unpickle what they are sent, so on a machine with other users they must not be open. RequireKey is ASGI
middleware; our own route lies behind it.
"""

from __future__ import annotations

import hmac
import logging
import os
from typing import Any

from grpo_vlm.rollout.route import GenerateRoute

OPEN_PATHS = ("/health",)
DUMPS = "vllm.logging_utils.dump_input"


class RequireKey:
    """Answers 401 unless the header is `Authorization: Bearer $GRPO_VLM_ROLLOUT_KEY`."""

    def __init__(self, app: Any) -> None:
        self.app = GenerateRoute(app)
        self.expected = f"Bearer {os.environ['GRPO_VLM_ROLLOUT_KEY']}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "lifespan" and scope["path"] not in OPEN_PATHS:
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self.expected):
                await _refuse(scope, send)
                return
        await self.app(scope, receive, send)


async def _refuse(scope: Any, send: Any) -> None:
    """401, or a closed handshake for a websocket."""
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008})
        return
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": 401, "headers": headers})
    await send({"type": "http.response.body", "body": b'{"error": "Unauthorized"}'})


def silence_dumps() -> None:
    """Keep the batch that an engine failed on out of the log: vLLM writes the numbers of its pictures there. The
    traceback stays. A filter, because vLLM may configure its loggers again later. Called by our plugin in each process
    of vLLM."""
    logging.getLogger(DUMPS).addFilter(lambda record: False)
