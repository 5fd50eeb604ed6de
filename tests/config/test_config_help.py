"""--help and docs/options.md come from the schema and are complete."""

import subprocess
import sys
from pathlib import Path

from grpo_vlm.config.help import default_text, format_help, format_markdown
from grpo_vlm.config.load import schema_options

ROOT = Path(__file__).parents[2]


def test_help_lists_every_key_once_with_type_default_and_help() -> None:
    text = format_help()
    heads = [line.strip() for line in text.splitlines() if line.startswith("  ") and not line.startswith("   ")]
    expected = {f"{o.key}  ({o.type_text}, default {default_text(o)})": o for o in schema_options().values()}
    assert sorted(heads) == sorted(expected)
    joined = " ".join(text.split())
    for option in schema_options().values():
        assert " ".join(option.help.split()) in joined


def test_the_common_keys_come_first() -> None:
    text = format_help()
    common, _, others = text.partition("All other keys:")
    assert f"The {sum(option.common for option in schema_options().values())} common keys:" in common
    for option in schema_options().values():
        assert f"  {option.key}  (" in (common if option.common else others)


def test_help_says_which_keys_do_not_work_yet() -> None:
    text = " ".join(format_help().split())
    assert "worker.actor.ulysses_size (int, default 1) Devices that share one sequence." in text
    assert "[not available in this version] worker.actor.use_torch_compile" in text
    assert "[no effect in this version]" in text


def test_options_md_is_up_to_date() -> None:
    assert (ROOT / "docs/options.md").read_text() == format_markdown(), (
        "run: python -m grpo_vlm.config.help --markdown > docs/options.md"
    )


def test_every_row_of_the_tables_has_eight_cells() -> None:
    rows = [
        line for line in format_markdown().splitlines() if line.startswith(("| `data", "| `worker", "| `algorithm"))
    ]
    wide = [row for row in rows if row.replace("\\|", "").count("|") == 9]
    assert len(rows) - len(wide) == 3  # the table of deviations has four columns
    assert len(wide) > 150


def test_the_module_prints_both_forms() -> None:
    command = [sys.executable, "-m", "grpo_vlm.config.help"]
    plain = subprocess.run(command, capture_output=True, text=True, check=True)
    marked = subprocess.run([*command, "--markdown"], capture_output=True, text=True, check=True)
    assert (plain.stdout, marked.stdout) == (format_help(), format_markdown())
