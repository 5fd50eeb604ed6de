"""Checks of what the configuration points at: data, templates, model, reward function, checkpoints and the port.

Nothing is imported or executed: the reward function's name is looked up in the parsed source.
"""

import ast
import difflib
import errno
import importlib.util
import os
import re
import socket
from pathlib import Path

from grpo_vlm.config.faults import Fault
from grpo_vlm.config.locations import scheme_of, split_config, split_source, split_sources
from grpo_vlm.config.schema import Config

_HUB_ID = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?")
_DATA_ENDINGS = (".parquet", ".json", ".jsonl", ".csv", ".arrow")
MODEL = "worker.actor.model.model_path"
REWARD, REWARDS = "worker.reward.reward_function", "worker.reward.reward_functions"


def required_faults(config: Config, needs_reward: bool, needs_train_files: bool, has_val_rows: bool) -> list[Fault]:
    """Keys that may not be empty."""
    faults = []
    if needs_train_files and not config.data.train_files:
        text = "data.train_files: is empty; name the rows, e.g. hiyouga/geometry3k@train or data/train.parquet"
        faults.append(Fault(("data.train_files",), text))
    if not config.worker.actor.model.model_path:
        text = f"{MODEL}: is empty; name a folder or hub id, e.g. Qwen/Qwen2.5-VL-3B-Instruct"
        faults.append(Fault((MODEL,), text))
    reward = config.worker.reward
    if needs_reward and not reward.reward_function and not reward.reward_functions:
        text = f"{REWARD}: is empty; name FILE.py:function, e.g. ./rewards/geo3k.py:compute_score"
        faults.append(Fault((REWARD,), text))
    if not config.data.val_files and not has_val_rows:
        wants = {"trainer.val_only": config.trainer.val_only, "trainer.val_freq": config.trainer.val_freq > 0}
        for key in (key for key, wanted in wants.items() if wanted):
            text = f"{key}: asks for validation, but data.val_files is empty; name the rows or remove the key"
            faults.append(Fault((key, "data.val_files"), text))
    return faults


def is_local(value: str) -> bool:
    """Whether a model or data source is meant as a path here, rather than as a hub id such as `org/name`."""
    if value.startswith(("/", ".", "~")) or value.endswith(_DATA_ENDINGS) or os.path.exists(value):
        return True
    return not _HUB_ID.fullmatch(value)


def file_faults(
    config: Config, needs_reward: bool = True, needs_train_files: bool = True, has_val_rows: bool = False
) -> list[Fault]:
    """Everything named in the configuration that is not there, or is not what it should be; what the caller supplies
    as Python objects is not looked for.
    """
    data, model = config.data, config.worker.actor.model
    faults = []
    sources = {"data.train_files": data.train_files} if needs_train_files else {}
    sources |= {} if has_val_rows else {"data.val_files": data.val_files}
    for key, source in sources.items():
        faults += _source_faults(key, source) if source else []
    for key, path in (
        ("data.format_prompt", data.format_prompt),
        ("data.override_chat_template", data.override_chat_template),
    ):
        faults += _missing(key, path, folder=False) if path is not None else []
    if data.image_dir is not None:
        faults += _missing("data.image_dir", data.image_dir, folder=True)
    for key, path in ((MODEL, model.model_path), ("worker.actor.model.tokenizer_path", model.tokenizer_path)):
        if path and is_local(path):
            faults += _missing(key, path, folder=True) or _no_config(key, path)
    if needs_reward and config.worker.reward.reward_function:
        faults += reward_faults(config.worker.reward.reward_function)
    for spec in config.worker.reward.reward_functions if needs_reward else ():
        faults += reward_faults(spec, REWARDS)
    return faults + _checkpoint_faults(config)


def _source_faults(key: str, source: str) -> list[Fault]:
    """Faults of each part of a mixture. What is behind a URL or on a hub is looked at when it is opened."""
    faults = []
    for part in split_sources(source):
        path, split = split_source(part)
        if not path:
            faults.append(Fault((key,), f"{key}: {source!r} has an empty part; remove the comma or name the rows"))
        elif not split:
            faults.append(Fault((key,), f"{key}: {part!r} ends with @; name the split, e.g. {path}@train"))
        elif (named := split_config(path)[0]) != path:
            faults += _missing(key, named, folder=True) if is_local(named) else []
        elif not scheme_of(path) and is_local(path):
            faults += _missing(key, path, folder=None)
    return faults


def expand_paths(config: Config) -> None:
    """Replace `~` at the start of every path by the home directory, in place. Splits, function names and hub ids stay
    as they are."""
    data, model, trainer = config.data, config.worker.actor.model, config.trainer
    for name in ("train_files", "val_files"):
        parts = split_sources(getattr(data, name) or "")
        setattr(data, name, ",".join(os.path.expanduser(part) for part in parts))
    for section, names in (
        (data, ("format_prompt", "override_chat_template", "image_dir")),
        (model, ("model_path", "tokenizer_path")),
        (config.worker.reward, ("reward_function",)),
        (trainer, ("save_checkpoint_path", "load_checkpoint_path")),
    ):
        for name in names:
            if value := getattr(section, name):
                setattr(section, name, os.path.expanduser(value))
    config.worker.reward.reward_functions = [
        os.path.expanduser(spec) for spec in config.worker.reward.reward_functions
    ]


def _missing(key: str, path: str, *, folder: bool | None) -> list[Fault]:
    """A fault when the path is absent, or is a file where a folder is wanted or the other way round (None: either)."""
    target = Path(path).expanduser()
    if target.exists() and (folder is None or target.is_dir() == folder):
        return []
    if target.exists():
        return [
            Fault((key,), f"{key}: {path} is a {'file; expected a folder' if folder else 'folder; expected a file'}")
        ]
    near = _nearest_name(target)
    remedy = f"did you mean {near}?" if near else f"the working directory is {Path.cwd()}"
    hub = "; a hub id has the form org/name" if folder and key.startswith("worker.actor.model") else ""
    return [Fault((key,), f"{key}: there is no {path}; {remedy}{hub}")]


def _nearest_name(target: Path) -> str:
    """A file beside the missing one whose name is much like it."""
    if not target.parent.is_dir():
        return ""
    close = difflib.get_close_matches(target.name, sorted(os.listdir(target.parent)), 1, 0.7)
    return str(target.parent / close[0]) if close else ""


def _no_config(key: str, path: str) -> list[Fault]:
    folder = Path(path).expanduser()
    wanted = "config.json" if key == MODEL else "tokenizer_config.json"
    if (folder / wanted).is_file():
        return []
    return [Fault((key,), f"{key}: {path} holds no {wanted}; expected a folder that save_pretrained wrote")]


def _checkpoint_faults(config: Config) -> list[Fault]:
    trainer = config.trainer
    faults = []
    if (path := trainer.load_checkpoint_path) is not None:
        key = "trainer.load_checkpoint_path"
        if not re.fullmatch(r"global_step_\d+", Path(path).name):
            text = f"{key}: {path} must end in global_step_N, e.g. checkpoints/easy_r1/demo/global_step_25"
            faults.append(Fault((key,), text))
        else:
            faults += _missing(key, path, folder=True)
    if (path := trainer.save_checkpoint_path) is not None:
        key = "trainer.save_checkpoint_path"
        folder = Path(path).expanduser().absolute()
        existing = next(part for part in (folder, *folder.parents) if part.exists())
        if not existing.is_dir():
            faults.append(Fault((key,), f"{key}: {existing} is a file; name a folder"))
        elif not os.access(existing, os.W_OK):
            faults.append(Fault((key,), f"{key}: {existing} is not writable; name another folder"))
    return faults


def reward_faults(spec: str, key: str = REWARD) -> list[Fault]:
    """Faults of `FILE.py[:function]` or `package.module:function`, found without importing it."""
    place, _, name = spec.rpartition(":") if ":" in spec else (spec, "", "")
    name = name or "main"
    if place.endswith(".py"):
        absent = _missing(key, place, folder=False)
        return absent or _function_faults(spec, Path(place).expanduser(), name, key)
    if os.sep in place or not re.fullmatch(r"\w+(\.\w+)*", place) or not name.isidentifier():
        text = f"{key}: {spec!r} is not of the form FILE.py:function or package.module:function"
        return [Fault((key,), text)]
    source = _module_source(place)
    if source is None:
        text = f"{key}: there is no module {place} on Python's path; install it, or name FILE.py:{name}"
        return [Fault((key,), text)]
    return _function_faults(spec, source, name, key)


def _module_source(module: str) -> Path | None:
    """The source file of a module, found without importing any of its parents."""
    top, *rest = module.split(".")
    found = importlib.util.find_spec(top)
    if found is None:
        return None
    if not rest:
        return Path(found.origin) if found.origin else None
    for folder in found.submodule_search_locations or ():
        path = Path(folder, *rest)
        for candidate in (path.with_suffix(".py"), path / "__init__.py"):
            if candidate.is_file():
                return candidate
    return None


def _function_faults(spec: str, source: Path, name: str, key: str) -> list[Fault]:
    if source.suffix != ".py":
        return []  # a compiled module; the loader will look inside
    try:
        tree = ast.parse(source.read_bytes(), filename=str(source))
    except SyntaxError as error:
        return [Fault((key,), f"{key}: {source} is not valid Python, line {error.lineno}: {error.msg}")]
    functions, others = _names(tree.body)
    if name in functions | others or "*" in others:
        return []
    close = difflib.get_close_matches(name, functions, 1) or sorted(functions)[:1]
    remedy = f"did you mean {spec.rpartition(':')[0] or spec}:{close[0]}?" if close else "it defines no function"
    return [Fault((key,), f"{key}: {source} has no function {name}; {remedy}")]


def _names(body: list[ast.stmt]) -> tuple[set[str], set[str]]:
    """Names that a module binds at its top level: functions, and everything else (`*` for a star import)."""
    functions, others = set(), set()
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            functions.add(node.name)
        elif isinstance(node, ast.ClassDef):
            others.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            others |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            others |= {
                leaf.id for leaf in ast.walk(node) if isinstance(leaf, ast.Name) and isinstance(leaf.ctx, ast.Store)
            }
        elif isinstance(node, ast.If | ast.Try | ast.With):
            inner = [item for item in ast.iter_child_nodes(node) if isinstance(item, ast.stmt)]
            if isinstance(node, ast.Try):
                inner += [item for handler in node.handlers for item in handler.body]
            more_functions, more_others = _names(inner)
            functions |= more_functions
            others |= more_others
    return functions, others


def port_faults(config: Config, *, external: bool = False) -> list[Fault]:
    """A fault when worker.rollout.port is set and something listens there already. external: the port of a server
    that is started apart; a run that uses one does not open it."""
    port, key, rollout = config.worker.rollout.port, "worker.rollout.port", config.worker.rollout
    if port is None or not 0 < port < 65536 or rollout.name != "vllm":
        return []
    if rollout.placement == "external" and not external:
        return []
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does; a port just closed is free
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            reason = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be opened ({error.strerror})"
            text = f"{key}: {port} {reason} on this machine; stop what uses it, or write null for a free one"
            return [Fault((key,), text)]
    return []
