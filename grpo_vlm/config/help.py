"""Text of --help and of docs/options.md, made from the schema so that it cannot drift.

python -m grpo_vlm.config.help                              # the text of --help
python -m grpo_vlm.config.help --markdown > docs/options.md
"""

import argparse
import textwrap

from grpo_vlm.config.keys import schema_options
from grpo_vlm.config.names import easyr1_name, trl_name, verl_name
from grpo_vlm.config.options import NEUTRAL, PLANNED, WORKS, Option

_MARKS = {WORKS: "", NEUTRAL: " [no effect in this version]", PLANNED: " [not available in this version]"}

_INTRO = """# Options

<!-- Generated: python -m grpo_vlm.config.help --markdown > docs/options.md -->

Every key of the configuration. Names, sections and defaults are EasyR1's. Values come from the schema's defaults, then
`--config FILE`, then `key=value` arguments with the full dotted key; later ones win. A file whose top level has
`base: OTHER.yaml` (a path relative to itself) starts from that file's values; configs/recipes/ has examples.

EasyR1's command lines run as they are, `config=FILE` included: `trainer.n_nodes`, `worker.reward.reward_type` and keys
of older versions are read with a notice, and where EasyR1's own example reward or template is missing, ours takes its
place. A command line with verl's `actor_rollout_ref` is translated: each option is named with what became of it. What
verl takes for options that are not named holds where it decides a result (greedy validation, clip 0.2, no KL term,
30 epochs, pictures of any size); memory and speed keep our defaults. `MODEL_PATH`, `TRAIN_FILE`, `TEST_FILE`,
`INFER_BACKEND` and `SP_SIZE` stand in for options that are not named. `grpo-vlm translate FILE_OR_ARGS` prints the
YAML. A verl run without a reward function scores each row by its `data_source`
(`worker.reward.reward_function=grpo_vlm.rewards.by_source:compute_score`).

Defaults that differ from EasyR1's:

| key | here | EasyR1 | why |
|---|---|---|---|
| `worker.rollout.tensor_parallel_size` | null (1) | 2 | small models need no split |
| `worker.rollout.dtype` | auto | bf16 | float32 on a CPU |
| `trainer.logger` | [console, file, tensorboard] | [console, wandb] | works without an account |
| `worker.actor.loss_avg_mode` | null (token) | token | a loss of TRL's implies its own average |
| `trainer.nnodes`, `trainer.n_gpus_per_node` | null | 1, 8 | the launcher's; another number is an error |

The column EasyR1 says `same` where it has the key. verl's name ends in `*` where several options below it decide the
key. TRL's names are arguments of GRPOConfig that come nearest.

`trainer.max_steps`, `val_freq`, `save_freq`, checkpoints, resume and the learning-rate schedule count rollout steps.

Status: *works*; *neutral*: accepted, and a line at the start says that it has no effect in this version;
*planned*: refused with its reason when set to anything but the default.
"""


def format_help() -> str:
    """Every key with type, default and help: the common ones first, then all in the order of the schema."""
    found = schema_options().values()
    common = [item for item in found if item.common]
    lines = [
        "Configuration: defaults < --config FILE < key=value. Keys and defaults are EasyR1's.",
        "",
        f"The {len(common)} common keys:",
        *(line for item in common for line in _entry(item)),
        "",
        "All other keys:",
        *(line for item in found if not item.common for line in _entry(item)),
    ]
    return "\n".join(lines) + "\n"


def format_markdown() -> str:
    """The text of docs/options.md."""
    parts = [_INTRO]
    common = [item for item in schema_options().values() if item.common]
    parts.append("## The common keys\n\n" + _table(common))
    for title in dict.fromkeys(_section(item) for item in schema_options().values()):
        rows = [item for item in schema_options().values() if _section(item) == title]
        parts.append(f"## {title}\n\n" + _table(rows))
    return "\n".join(parts)


def _section(item: Option) -> str:
    """Heading of a key: its section, two levels deep below worker."""
    parts = item.key.split(".")[:-1]
    return ".".join(parts[:2])


def _table(rows: list[Option]) -> str:
    lines = ["| key | default | type | EasyR1 | verl | TRL | status | help |", "|---|---|---|---|---|---|---|---|"]
    for item in rows:
        names = (
            _names("same" if easyr1_name(item.key) else ""),
            _names(verl_name(item.key)),
            _names(trl_name(item.key)),
        )
        cells = (f"`{item.key}`", f"`{default_text(item)}`", item.type_text, *names, item.status, _about(item))
        lines.append(
            "| "
            + " | ".join(cell.replace("|", "\\|").replace("<", "&lt;").replace("&lt;br>", "<br>") for cell in cells)
            + " |"
        )
    return "\n".join(lines) + "\n"


def _names(names: str) -> str:
    """Names as code, each on a line of its own within the cell; a dash when there is none."""
    return "<br>".join(f"`{name}`" for name in names.split(", ")) if names else "-"


def _entry(item: Option) -> list[str]:
    head = f"  {item.key}  ({item.type_text}, default {default_text(item)})"
    body = _about(item) + _MARKS[item.status]
    return [head, *textwrap.wrap(body, 112, initial_indent="      ", subsequent_indent="      ")]


def _about(item: Option) -> str:
    """Help, choices, range, example and the reason of a key that does not work yet, as sentences."""
    parts = [item.help]
    if item.choices:
        parts.append(f"Valid: {', '.join(str(choice).lower() for choice in item.choices)}.")
    if item.rule:
        parts.append(f"Must be {item.rule.text}.")
    if item.example:
        parts.append(f"E.g. {item.example}")
    if item.status != WORKS:
        parts.append(f"({item.status}: {item.reason})")
    return " ".join(parts)


def default_text(item: Option) -> str:
    """A key's default as one writes it in YAML."""
    if item.default is None or isinstance(item.default, bool):
        return {None: "null", True: "true", False: "false"}[item.default]
    if isinstance(item.default, list):
        return "[" + ", ".join(str(value) for value in item.default) + "]"
    return '""' if item.default == "" else str(item.default)


def main() -> None:
    parser = argparse.ArgumentParser(description="List every key of the configuration.")
    parser.add_argument("--markdown", action="store_true", help="as the text of docs/options.md")
    print(format_markdown() if parser.parse_args().markdown else format_help(), end="")


if __name__ == "__main__":
    main()
