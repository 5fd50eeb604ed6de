"""ASGI middleware for the vLLM server: every path but /health needs the API key.

vLLM itself asks for the key on /v1 only. Its development routes (sleep, weight transfer, collective calls) change the
model and unpickle what they are sent, so on a machine with other users they must not be open.
"""

from __future__ import annotations

import hmac
import os
from typing import Any

OPEN_PATHS = ("/health",)


class RequireKey:
    """Answers 401 unless the header is `Authorization: Bearer $VLLM_API_KEY`."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self.expected = f"Bearer {os.environ['VLLM_API_KEY']}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self.expected):
                headers = [(b"content-type", b"application/json")]
                await send({"type": "http.response.start", "status": 401, "headers": headers})
                await send({"type": "http.response.body", "body": b'{"error": "Unauthorized"}'})
                return
        await self.app(scope, receive, send)
