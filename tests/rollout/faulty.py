"""ASGI middleware for a server under test: the engine fails the prompt whose seed stands in a file.

The failure takes vLLM's own way, an exception in the queue of one request. The file is named by the environment
variable GRPO_VLM_TEST_FAULT and holds `{"seed": ..., "times": ...}`; `times` counts down.
"""

import json
import os
from pathlib import Path

from grpo_vlm.rollout.wire import PATH

VARIABLE = "GRPO_VLM_TEST_FAULT"


class FailPrompt:
    def __init__(self, app):
        self.app, self.path, self.wrapped = app, Path(os.environ[VARIABLE]), False

    async def __call__(self, scope, receive, send):
        if scope["type"] == "http" and scope["path"] == PATH and not self.wrapped:
            self.wrapped = True
            self._wrap(scope["app"].state.engine_client)
        await self.app(scope, receive, send)

    def _wrap(self, engine):
        add_request = engine.add_request

        async def add_and_fail(request_id, prompt, params, *args, **kwargs):
            queue = await add_request(request_id, prompt, params, *args, **kwargs)
            fault = json.loads(self.path.read_text()) if self.path.exists() else {"times": 0}
            if fault["times"] and params.seed == fault["seed"]:
                self.path.write_text(json.dumps(fault | {"times": fault["times"] - 1}))
                queue.put(RuntimeError("made by the test"))
            return queue

        engine.add_request = add_and_fail
