"""Checks of worker.rollout beyond single keys: where the server runs, what else it is given, how it samples."""

import difflib
import os
import re
from collections.abc import Mapping, Sequence
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from grpo_vlm.config.faults import Fault
from grpo_vlm.config.load import fits
from grpo_vlm.config.schema import Config
from grpo_vlm.config.schema_rollout import STARTS_SERVER, VAL_OVERRIDES, VLLM_ONLY, RolloutConfig
from grpo_vlm.config.values import KEY_VARIABLE, sampling_values

ROLLOUT = "worker.rollout"
SHORTEST_KEY = 16
_ARGUMENT = re.compile(r"[a-z][a-z0-9_-]*")
_ADDRESS = "not part of the address"
# Arguments of vLLM that this package gives itself -> the key that decides them, or why they are fixed.
OURS = {
    "model": "worker.actor.model.model_path decides it",
    "tokenizer": "worker.actor.model.tokenizer_path decides it",
    "trust_remote_code": "worker.actor.model.trust_remote_code decides it",
    "hf_overrides": "worker.actor.model.override_config decides it",
    "chat_template": "data.override_chat_template decides it",
    "limit_mm_per_prompt": "worker.rollout.limit_images decides it",
    "disable_log_stats": "worker.rollout.disable_log_stats decides it",
    "served_model_name": "the trainer's requests name the model",
    "host": "the server listens on 127.0.0.1 only",
    "logprobs_mode": "the trainer compares its own log-probabilities with those of the sampled distribution",
    "generation_config": "the sampling is worker.rollout's",
    "weight_transfer_config": "it follows from worker.rollout.placement",
    "middleware": "it asks for the key",
    "mm_device_do_normalize": "the trainer's pixels are normalised when they come",
    "enable_sleep_mode": "it follows from worker.rollout.placement",
    "enable_lora": "worker.rollout.lora_sync decides it",
    "enable_tower_connector_lora": "worker.rollout.lora_sync decides it",
    "max_lora_rank": "worker.actor.model.lora.rank decides it",
    "api_key": f"other users see a command line; the key is random, or ${KEY_VARIABLE}",
    "hf_token": "other users see a command line; set $HF_TOKEN",
    "uds": "the trainer's requests go to a port",
} | {
    name: f"worker.rollout.{name} decides it"
    for name in (
        "port",
        "dtype",
        "seed",
        "max_model_len",
        "max_num_batched_tokens",
        "gpu_memory_utilization",
        "enforce_eager",
        "enable_chunked_prefill",
        "tensor_parallel_size",
        "data_parallel_size",
    )
}
OURS |= dict.fromkeys(
    ("nnodes", "node_rank", "master_addr", "master_port", "data_parallel_address", "data_parallel_backend"),
    "the server runs on one machine and its processes meet on 127.0.0.1",
)


def rollout_faults(config: Config, per_node: int, num_nodes: int) -> list[Fault]:
    """Everything wrong within worker.rollout, given the number of training processes per machine."""
    faults = engine_kwargs_faults(config.worker.rollout.engine_kwargs) + stop_faults(config.worker.rollout.stop)
    if config.worker.rollout.name == "vllm":
        faults += placement_faults(config.worker.rollout, per_node, num_nodes)
    return faults + val_sampling_faults(config)


def placement_faults(rollout: RolloutConfig, per_node: int, num_nodes: int) -> list[Fault]:
    """Faults of placement, gpus, base_url and the two parallel sizes."""
    if rollout.placement == "external":
        return _external_faults(rollout)
    if rollout.placement == "dedicated":
        return _dedicated_faults(rollout, per_node, num_nodes)
    tensor, data = rollout.tensor_parallel_size or 1, rollout.data_parallel_size
    keys = (f"{ROLLOUT}.tensor_parallel_size", f"{ROLLOUT}.data_parallel_size")
    have = f"but a shared server has those of the {per_node} training process(es) on each machine"
    if tensor * (data or 1) > per_node:
        text = (
            f"{keys[data is not None]}: {data or 1} engine(s) of {tensor} GPU(s) need {tensor * (data or 1)} GPUs, "
            f"{have}; lower one of {keys[0]} and data_parallel_size, or start more processes"
        )
        return [Fault(keys, text)]
    if data is None and per_node % tensor:
        text = f"{keys[0]}: engines of {tensor} GPUs, {have}; set it to a divisor of {per_node}, or set {keys[1]}"
        return [Fault(keys, text)]
    return []


def _dedicated_faults(rollout: RolloutConfig, per_node: int, num_nodes: int) -> list[Fault]:
    key, gpus = f"{ROLLOUT}.gpus", rollout.gpus
    if num_nodes > 1:
        text = (
            f"{ROLLOUT}.placement: dedicated works on one machine, and the launcher started {num_nodes}: the server "
            "listens on 127.0.0.1 only. Set it to shared, or to external"
        )
        return [Fault((f"{ROLLOUT}.placement",), text)]
    if not gpus:
        text = f"{key}: is empty; name the GPUs of the dedicated server, e.g. [{per_node}]"
        return [Fault((key,), text)]
    taken, visible = [gpu for gpu in gpus if gpu < per_node], visible_gpus()
    problem = ""
    if len(set(gpus)) < len(gpus):
        problem = f"{gpus} names a GPU twice"
    elif taken:
        problem = (
            f"{taken} belong to training processes: the launcher started {per_node} on this machine, which take GPU 0 "
            f"to {per_node - 1}. Name GPUs from {per_node} on, or start fewer processes (accelerate launch "
            "--num_processes)"
        )
    elif visible is not None and max(gpus) >= len(visible):
        problem = (
            f"there is no GPU {max(gpus)}: CUDA_VISIBLE_DEVICES names {len(visible)}, numbered from 0. Let it name "
            "the training processes' GPUs first and then the server's"
        )
    if problem:
        return [Fault((key,), f"{key}: {problem}")]
    tensor, data = rollout.tensor_parallel_size or 1, rollout.data_parallel_size
    if len(gpus) % tensor or (data is not None and tensor * data != len(gpus)):
        wanted = f"{tensor} x {data}" if data is not None else f"a multiple of {tensor}"
        text = (
            f"{key}: names {len(gpus)} GPU(s), but {ROLLOUT}.tensor_parallel_size and data_parallel_size ask for "
            f"{wanted}; name as many, or set data_parallel_size to null"
        )
        return [Fault((key, f"{ROLLOUT}.tensor_parallel_size", f"{ROLLOUT}.data_parallel_size"), text)]
    return []


def visible_gpus() -> list[str] | None:
    """What CUDA_VISIBLE_DEVICES names; None when it is not set, so that all GPUs are visible."""
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if value is None else [part.strip() for part in value.split(",") if part.strip()]


def _external_faults(rollout: RolloutConfig) -> list[Fault]:
    key, faults = f"{ROLLOUT}.base_url", []
    if rollout.base_url is None:
        text = f"{key}: is null; with {ROLLOUT}.placement = external name the server, e.g. http://127.0.0.1:8000"
        faults.append(Fault((key,), text))
    elif problem := address_problem(rollout.base_url):
        faults.append(Fault((key,), f"{key}: {problem}; write e.g. http://127.0.0.1:8000"))
    if problem := key_problem():
        text = (
            f"{ROLLOUT}.placement: external needs the server's key in the environment variable {KEY_VARIABLE}, which "
            f"{problem}; export the one that the server was started with"
        )
        faults.append(Fault((f"{ROLLOUT}.placement",), text))
    return faults


def key_problem() -> str:
    """What is wrong with the key in the environment, or an empty string. Never the key itself."""
    key = os.environ.get(KEY_VARIABLE, "")
    if not key:
        return "is not set"
    if len(key) < SHORTEST_KEY:
        return f"is shorter than {SHORTEST_KEY} characters"
    if not re.fullmatch(r"[\x21-\x7e][\x20-\x7e]*[\x21-\x7e]", key):
        return "has a blank at an end, a line break or a letter outside ASCII, which no HTTP header may"
    return ""


def address_problem(url: str) -> str:
    """What is wrong with a server's address, or an empty string. An address may carry no password: it is logged."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        return f"cannot be read as an address ({error})"
    if parts.username is not None or parts.password is not None:
        return f"a user name or password is {_ADDRESS}; the key is read from {KEY_VARIABLE}"
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return f"{url!r} is no address of the form http://HOST:PORT"
    if parts.path.strip("/") or parts.query or parts.fragment:
        return f"{url!r} goes on after the port; a path is {_ADDRESS}"
    return "" if port is None or port > 0 else f"{url!r} has port 0"


def is_loopback(url: str) -> bool:
    """Whether an address is this machine's own."""
    return is_loopback_host(urlsplit(url).hostname or "")


def is_loopback_host(host: str) -> bool:
    """Whether a host, a name or an address, is this machine to itself."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def engine_kwargs_faults(given: Mapping[str, Any]) -> list[Fault]:
    """Arguments of worker.rollout.engine_kwargs that vLLM cannot be given."""
    section, faults = f"{ROLLOUT}.engine_kwargs", []
    for name, value in given.items():
        key = f"{section}.{name}"
        plain = name.replace("-", "_")
        owner = _owner(plain) or _owner(plain.removeprefix("no_"))
        if not _ARGUMENT.fullmatch(name):
            text = f"{key}: is no argument of vLLM's server; write its name without dashes before it"
            faults.append(Fault((key,), text))
        elif owner:
            faults.append(Fault((key,), f"{key}: cannot be set here: {owner}"))
        elif value is None:
            faults.append(Fault((key,), f"{key}: is null; remove it for vLLM's default"))
    return faults


def _owner(name: str) -> str | None:
    """Why an argument of vLLM cannot be set. vLLM also takes the beginning of a name for the whole one."""
    if name in OURS:
        return OURS.get(name)
    whole = next((full for full in OURS if name and full.startswith(name)), None)
    return whole and f"it is short for {whole}: {OURS[whole]}"


def stop_faults(stop: Sequence[str]) -> list[Fault]:
    """Stop texts that would end every answer at once."""
    if all(stop):
        return []
    text = f"{ROLLOUT}.stop: holds an empty text, which would end every response at once; remove it"
    return [Fault((f"{ROLLOUT}.stop",), text)]


def val_sampling_faults(config: Config) -> list[Fault]:
    """Faults inside worker.rollout.val_override_config."""
    section, faults = f"{ROLLOUT}.val_override_config", []
    for name, value in config.worker.rollout.val_override_config.items():
        key = f"{section}.{name}"
        if name not in VAL_OVERRIDES:
            close = difflib.get_close_matches(name, VAL_OVERRIDES, 1)
            nearest = f"did you mean {close[0]}? " if close else ""
            faults.append(Fault((key,), f"{key}: unknown key; {nearest}Valid: {', '.join(VAL_OVERRIDES)}"))
            continue
        kind, rule = VAL_OVERRIDES[name]
        if isinstance(value, str) or not fits(value, kind):
            faults.append(Fault((key,), f"{key}: is {value!r} ({type(value).__name__}); expected {kind}"))
        elif not rule.holds(value):
            shown = f"{value:g}" if isinstance(value, float) else value
            faults.append(Fault((key,), f"{key}: {shown} is out of range; it must be {rule.text}"))
    return faults


def rollout_notices(config: Config) -> list[str]:
    """Lines about valid settings of worker.rollout that change nothing, or that bias the log-probabilities."""
    rollout = config.worker.rollout
    val = sampling_values(config, validation=True)
    lines = {
        f"{ROLLOUT}.top_p or top_k cuts the distribution that is sampled; the trainer's log-probabilities are of "
        "the whole one, so training is slightly off-policy": rollout.top_p < 1 or rollout.top_k > 0,
        f"{ROLLOUT}.min_p cuts the distribution that is sampled; the trainer's log-probabilities are of the whole "
        "one, so training is slightly off-policy": rollout.min_p > 0,
        f"{ROLLOUT}.repetition_penalty changes the distribution that is sampled by what was said before; the "
        "trainer's log-probabilities are without it, so training is off-policy": rollout.repetition_penalty != 1,
        f"{ROLLOUT}.stop ends responses without the end token, so the model does not learn to end them": bool(
            rollout.stop
        ),
        f"{ROLLOUT}.val_override_config: temperature 0 makes all n validation answers of a prompt the same": (
            val["temperature"] == 0 and val["n"] > 1
        ),
    }
    return [line for line, holds in lines.items() if holds] + _idle_notices(config)


def _idle_notices(config: Config) -> list[str]:
    """One line for each group of keys that the engine or the placement does not use."""
    rollout, default = config.worker.rollout, RolloutConfig()
    names = [name for name in VLLM_ONLY if getattr(rollout, name) != getattr(default, name)]
    if rollout.name != "vllm":
        listed = f"{ROLLOUT}.{', '.join(names)}"
        return [f"{listed}: no effect with {ROLLOUT}.name = {rollout.name}; vllm uses it"] if names else []
    lines = []
    unused = {"gpus": "dedicated", "base_url": "external"}
    for name, placement in unused.items():
        if name in names and rollout.placement != placement:
            lines.append(f"{ROLLOUT}.{name} has no effect: {ROLLOUT}.placement is {rollout.placement}")
    if rollout.placement == "external":
        idle = [name for name in STARTS_SERVER if name in names]
        if idle:
            lines.append(f"{ROLLOUT}.{', '.join(idle)}: no effect on a server that runs already; start it with them")
        if not is_loopback(rollout.base_url) and rollout.base_url.startswith("http:"):
            lines.append(
                f"{ROLLOUT}.base_url is on another machine: key, prompts and answers travel there in plain text"
            )
    if rollout.lora_sync == "adapter" and config.worker.actor.model.lora.rank == 0:
        lines.append(f"{ROLLOUT}.lora_sync has no effect: worker.actor.model.lora.rank is 0")
    return lines
