"""Reads a verl configuration: files and key=value items with the section `actor_rollout_ref`.

Every option that is named is translated, or listed with the reason why nothing takes it, or refused where leaving it
out would change the result. For options that are not named verl's own defaults hold where they decide a result, ours
where they decide memory or speed alone. Keys of our schema that verl does not have pass through.
"""

import difflib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from grpo_vlm.config.dialect_easyr1 import available_loggers
from grpo_vlm.config.dialect_verl_groups import GROUPS, Reading
from grpo_vlm.config.dialect_verl_keys import KEYS, A, M, R, Rule, rule_of
from grpo_vlm.config.faults import Fault
from grpo_vlm.config.keys import schema_options, schema_sections
from grpo_vlm.config.layers import Layer, merged, nested

MARK = "actor_rollout_ref"
# Values that verl takes for keys that a command line does not name, where they decide a result and differ from ours.
# What decides memory, speed or the look of a run alone keeps our own default.
DEFAULTS: dict[str, Any] = {
    "data.train_batch_size": 1024,
    "data.filter_overlong_prompts": False,
    A + "ppo_mini_batch_size": 256,
    A + "clip_ratio_low": 0.2,
    A + "clip_ratio_high": 0.2,
    A + "clip_ratio_c": 3.0,
    A + "loss_agg_mode": "token-mean",
    A + "policy_loss.loss_mode": "vanilla",
    A + "use_kl_loss": False,
    A + "kl_loss_coef": 0.001,
    A + "kl_loss_type": "low_var_kl",
    A + "use_dynamic_bsz": False,
    A + "ppo_max_token_len_per_gpu": 16384,
    A + "policy_loss.clip_cov_ratio": 0.0002,
    A + "policy_loss.clip_cov_lb": 1.0,
    A + "policy_loss.clip_cov_ub": 5.0,
    A + "policy_loss.kl_cov_ratio": 0.0002,
    A + "policy_loss.ppo_kl_coef": 0.1,
    R + "val_kwargs.do_sample": False,
    R + "val_kwargs.temperature": 0.0,
    R + "val_kwargs.top_p": 1.0,
    R + "val_kwargs.top_k": -1,
    R + "val_kwargs.n": 1,
    M + "trust_remote_code": False,
    M + "lora_alpha": 16,
    "algorithm.adv_estimator": "gae",
    "algorithm.use_kl_in_reward": False,
    "algorithm.kl_penalty": "kl",
    "algorithm.kl_ctrl.type": "fixed",
    "algorithm.kl_ctrl.kl_coef": 0.001,
    "algorithm.kl_ctrl.horizon": 10000,
    "algorithm.kl_ctrl.target_kl": 0.1,
    "algorithm.filter_groups.enable": False,
    "trainer.total_epochs": 30,
    "trainer.resume_mode": "auto",
}
# The environment that verl's example scripts read -> the key that they set by it.
ENVIRONMENT = {
    "MODEL_PATH": M + "path",
    "TRAIN_FILE": "data.train_files",
    "TEST_FILE": "data.val_files",
    "INFER_BACKEND": R + "name",
    "SP_SIZE": A + "ulysses_sequence_parallel_size",
}
# Keys that hold a dict: what is below them is the value.
DICTS = (
    M + "override_config",
    R + "engine_kwargs.vllm",
    R + "engine_kwargs.sglang",
    R + "engine_kwargs.trtllm",
    A + "optim.override_optimizer_config",
    "data.mm_processor_kwargs",
    "data.apply_chat_template_kwargs",
    "custom_reward_function.reward_kwargs",
    "reward.custom_reward_function.reward_kwargs",
)


@dataclass(frozen=True)
class Translation:
    """One option of ours that a verl configuration sets."""

    sources: tuple[str, ...]
    """The verl keys that are named and decide it; empty: verl's default."""
    key: str
    value: Any


def is_verl(layers: Sequence[Layer]) -> bool:
    """Whether some source has verl's section."""
    return any(MARK in layer.tree for layer in layers)


def read(layers: Sequence[Layer]) -> tuple[list[Translation], Reading, list[Layer], list[Fault]]:
    """What the sources say in our terms.

    Returns: the translations in verl's order; the reading, with what is left out and refused; the layers of keys that
    are ours already; and faults of keys that are neither's.
    """
    verl, ours, faults = _split(layers)
    resolved, problems = _resolved(verl)
    given = {key: value for key, value in resolved.items() if value != "???"}
    for variable, key in ENVIRONMENT.items():
        if key not in given and os.environ.get(variable):
            given[key] = os.environ[variable]
    reading = Reading(given, DEFAULTS)
    for key, value in given.items():
        _single(reading, key, value)
    for key in (key for key in DEFAULTS if key not in given):
        rule = rule_of(key)
        if not rule.together:
            reading.put(rule.to, DEFAULTS[key])
    for group in GROUPS:
        group(reading)
    handled = {key for keys, _, _ in reading.made for key in keys}
    handled |= {key for key, _ in (*reading.left, *reading.refused)}
    for key in given:  # below a section that is read as a whole
        if key not in handled and not key.endswith("_target_"):
            reading.refuse(key, "no part of this package reads it; remove it")
    made = [Translation(tuple(key for key in keys if key in given), to, value) for keys, to, value in reading.made]
    return made, reading, ours, faults + problems


def translate(layers: Sequence[Layer]) -> tuple[list[Layer], list[str], list[Fault]]:
    """The layers under our keys, one notice for each option, and what is refused or unknown."""
    made, reading, ours, faults = read(layers)
    notices = []
    for item in made:
        if item.sources:
            named = ", ".join(f"{key}={shown(reading.given[key])}" for key in item.sources)
            notices.append(f"verl: {named} -> {item.key}={shown(item.value)}")
    defaults = [f"{item.key}={shown(item.value)}" for item in made if not item.sources and _differs(item)]
    if defaults:
        notices.append(f"verl's defaults for what is not named: {', '.join(defaults)}")
    notices += [f"verl: {key}={shown(reading.given[key])} is left out: {reason}" for key, reason in reading.left]
    faults += [
        Fault((key,), f"{key}: {shown(reading.get(key))} is not available here: {reason}")
        for key, reason in reading.refused
    ]
    loggers: dict[str, None] = {}
    done = [layer for layer in layers if layer.unreadable]
    for item in made:
        value = available_loggers(item.key, item.value, loggers) if item.key == "trainer.logger" else item.value
        source = f"from {' and '.join(item.sources)}" if item.sources else "verl's default"
        done.append(Layer(source, nested(item.key, value)))
    return [*done, *ours], notices + list(loggers), faults


def shown(value: Any) -> str:
    """A value as one would write it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {shown(inner)}" for key, inner in value.items()) + "}"
    return f"[{', '.join(map(shown, value))}]" if isinstance(value, list | tuple) else str(value)


def _differs(item: Translation) -> bool:
    """Whether a default of verl's is not ours."""
    option = schema_options().get(item.key)
    return option is None or option.default != item.value


def _single(reading: Reading, key: str, value: Any) -> None:
    """A key with a rule of its own, read by itself."""
    rule = rule_of(key)
    if rule is None or rule.together:
        return
    if rule.to:
        reading.put(rule.to, _mapped(rule, value), key)
    elif rule.accepted and value not in rule.accepted:
        reading.refuse(key, rule.reason)
    else:
        reading.leave(key, "it is always so here" if rule.accepted else rule.reason)


def _mapped(rule: Rule, value: Any) -> Any:
    return rule.values[value] if rule.values and not isinstance(value, list | dict) and value in rule.values else value


def _split(layers: Sequence[Layer]) -> tuple[dict[str, Any], list[Layer], list[Fault]]:
    """verl's keys as one nested dict, our own keys as layers, and faults of unknown ones."""
    verl: dict[str, Any] = {}
    ours: list[Layer] = []
    faults = [fault for layer in layers for fault in layer.faults if not layer.unreadable]
    for layer in layers:
        own: dict[str, Any] = {}
        for key, value in _leaves(layer.tree):
            if rule_of(key) is not None:
                verl = merged(verl, nested(key, value))
            elif key in schema_options() or key in schema_sections() or _is_inside(key):
                own = merged(own, nested(key, value))
            elif key.rpartition(".")[2] != "_target_":
                faults.append(_unknown(key, layer.source))
        if own:
            ours.append(Layer(layer.source, own))
    return verl, ours, faults


def _is_inside(key: str) -> bool:
    """Whether a key lies in one of our options that hold a dict."""
    return any(key.startswith(f"{name}.") for name, option in schema_options().items() if option.kind == "dict")


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Dotted keys and their values; a key that holds a dict is one value."""
    found = []
    for name, value in tree.items():
        key = f"{prefix}{name}"
        option = schema_options().get(key)
        whole = key in DICTS or (option is not None and option.kind == "dict")
        if isinstance(value, Mapping) and value and not whole:
            found += _leaves(value, f"{key}.")
        else:
            found.append((key, value))
    return found


def _resolved(verl: dict[str, Any]) -> tuple[dict[str, Any], list[Fault]]:
    """Dotted keys and values, with interpolations between verl's own keys and the environment filled in."""
    if "${" not in repr(verl):
        return dict(_leaves(verl)), []
    try:
        return dict(_leaves(OmegaConf.to_container(OmegaConf.create(verl), resolve=True))), []
    except OmegaConfBaseException as error:
        return dict(_leaves(verl)), [Fault((), f"{error.full_key}: {str(error).splitlines()[0]}")]


def _unknown(key: str, source: str) -> Fault:
    parent, _, name = key.rpartition(".")
    siblings = {
        other.rstrip("._").rpartition(".")[2]: other.rstrip("._") for other in KEYS if other.startswith(parent)
    }
    near = next((siblings[close] for close in difflib.get_close_matches(name, siblings, 1, 0.6)), "")
    remedy = f"did you mean {near}?" if near else "`grpo-vlm translate` shows what is known; remove it"
    return Fault((key,), f"{key}{f' ({source})' if source else ''}: no option of verl's that is known here; {remedy}")
