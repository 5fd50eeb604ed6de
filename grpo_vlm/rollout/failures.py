"""How a request to the server can fail, told apart by what helps: nothing, or a restart.

The contract of the client with the supervisor (supervise.py), `VLLMClient.generate(batch, version, on_progress,
on_answer=..., watch=...)`:

- `on_answer(index, completions)` is called in the caller's thread for each finished request, as soon as it is there;
  what was received before a failure is delivered before the failure is raised, so that it need not be made again.
- `watch()` is called in the caller's thread about twice a second while requests wait. What it raises ends the call:
  connections are closed, nothing waits any longer.
- A connection that broke before an answer (an idle one that the server had closed), and an answer of 5xx, are asked
  again on a fresh connection with the same seed, a few times; `client.retries` counts these. What still fails then is
  raised as one of the errors below.
"""

from grpo_vlm.errors import RolloutError


class RequestRefused(RolloutError):
    """The server answered one prompt with an error. It would do so again: only another prompt or setting helps.

    row_id: the prompt's row. status: the HTTP status.
    """

    def __init__(self, row_id: str, status: int, reason: str) -> None:
        super().__init__(row_id, status, reason)  # what pickle gives to __init__ in another process
        self.row_id, self.status, self.reason = row_id, status, reason

    def __str__(self) -> str:
        return f"row {self.row_id}: the vLLM server answered {self.status}: {self.reason}"


class ServerGone(RolloutError):
    """The server cannot be reached, broke off, or has hung: a fresh one may help."""


class WeightsLost(RolloutError):
    """The server answers, but not with the weights of the last sync: it was started again since. A sync helps."""


class RequestTimedOut(RolloutError):
    """One prompt's answer did not come within `limit_s` seconds, the value of the configuration's `key`."""

    def __init__(self, row_id: str, limit_s: float, key: str = "worker.rollout.request_timeout_s") -> None:
        super().__init__(row_id, limit_s, key)
        self.row_id, self.limit_s, self.key = row_id, limit_s, key

    def __str__(self) -> str:
        return f"row {self.row_id}: no answer from the vLLM server within {self.limit_s:g} s ({self.key})"
