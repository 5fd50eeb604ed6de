"""Why a vLLM server did not start, read from its log: the first error and what to do about it."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any

from grpo_vlm.rollout import versions

PORT_TAKEN = "address already in use"
SHOWN = 400  # characters of an error
SECTION = "worker.rollout.engine_kwargs"
# What stands before the text of a line: which process wrote it, and the logger's level, time and place.
_PREFIX = re.compile(r"(\(\w+ pid=\d+\) )?((?P<level>[A-Z]+) \d\d-\d\d [\d:]+ (\[.*?\] )?)?")
_QUIET = {"DEBUG", "INFO", "WARNING"}
_ERROR = re.compile(r"[\w.]*(Error|Exception)(: |$)")
_INVALID = re.compile(r"[\w.]*ValidationError: \d+ validation errors? for (\w+)")
_UNKNOWN = re.compile(r"^\S+: error: unrecognized arguments: (.+)$", re.MULTILINE)
_REFUSED = re.compile(r"^\S+: error: argument --([\w-]+)\S*: (.+)$", re.MULTILINE)
# What a line of the log says -> what to do about it.
REMEDIES = {
    PORT_TAKEN: "set worker.rollout.port to a free port, or to null to have one chosen",
    "No available memory for the cache": "raise gpu_memory_utilization or lower max_model_len (worker.rollout)",
    "less than desired GPU memory": "lower worker.rollout.gpu_memory_utilization or free the memory that others use",
    "KV cache is needed": "raise worker.rollout.cpu_kv_cache_gb or gpu_memory_utilization, or lower max_model_len",
    "out of memory": "lower worker.rollout.gpu_memory_utilization, max_num_batched_tokens or data.max_pixels",
    "greater than the derived max_model_len": "lower worker.rollout.max_model_len to what the model supports",
    "in the world of size": "lower tensor_parallel_size or data_parallel_size (worker.rollout)",
    "undefined symbol": "install the torch release that this vLLM was built for (see requirements/)",
}


def refused_argument(log: str, given: Mapping[str, Any]) -> str | None:
    """What vLLM's command line did not take of `given` (worker.rollout.engine_kwargs), in one line; None when it took
    all."""
    keys = {name.replace("_", "-").removeprefix("no-"): name for name in given}
    if found := _UNKNOWN.search(log):
        words = [word.removeprefix("--").removeprefix("no-") for word in found[1].split() if word.startswith("--")]
        known = sorted(set(re.findall(r"\[--([a-z][\w-]*)", log)))
        parts = [_unknown(keys[word], difflib.get_close_matches(word, known, 1)) for word in words if word in keys]
        if parts:
            release = "{}.{}".format(*versions.installed())
            return f"vLLM {release} has no such argument: {'; '.join(parts)}. Correct or remove it"
    if (found := _REFUSED.search(log)) and (key := keys.get(found[1].removeprefix("no-"))):
        return f"{SECTION}.{key}: is {given[key]!r}; vLLM says: {found[2]}"
    return None


def _unknown(key: str, close: list[str]) -> str:
    return f"{SECTION}.{key}" + (f" (did you mean {close[0].replace('-', '_')}?)" if close else "")


def first_error(log: str) -> str | None:
    """The first exception in the log; those after it are its consequences."""
    lines = _loud_lines(log)
    for index, line in enumerate(lines):
        if found := _INVALID.match(line):  # what is invalid stands in the lines below, and a web page below that
            words = [text.strip().partition(" [type=")[0] for text in lines[index + 1 : index + 3]]
            words = [text for text in words if not text.startswith("For further information")]
            return f"{found[1]}: {': '.join(words)}".replace("Value error, ", "")[:SHOWN]
        if _ERROR.match(line):
            return line.strip()[:SHOWN]
    return None


def likely_remedy(log: str, given: Mapping[str, Any]) -> str | None:
    """What to do about it, if the log tells. given: worker.rollout.engine_kwargs."""
    lines = _loud_lines(log)
    text = "\n".join(lines).lower()
    known = next((advice for sign, advice in REMEDIES.items() if sign.lower() in text), None)
    if known is None and given and any(_INVALID.match(line) for line in lines):
        return f"correct or remove what vLLM was given by {', '.join(f'{SECTION}.{name}' for name in given)}"
    return known


def _loud_lines(log: str) -> list[str]:
    """The texts of lines that are no warning and no information: those name errors that might come."""
    found = [(line, _PREFIX.match(line)) for line in log.splitlines()]
    return [line[prefix.end() :] for line, prefix in found if prefix["level"] not in _QUIET]
