"""report.html: one self-contained page with the curves, the samples and the configuration of one run or several.

    grpo-vlm report RUN [RUN2 ...] [--out FILE]

It is made of metrics.jsonl, groups.jsonl with pictures/ and config.yaml of the run folder. The page needs no network
and no server; assets/ holds its markup, style and scripts, which are put in as they are.
"""

import argparse
import base64
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import yaml
from markupsafe import Markup

from grpo_vlm.config import Config, to_yaml
from grpo_vlm.errors import ConfigError
from grpo_vlm.report.files import (
    GROUPS_NAME,
    PICTURES_NAME,
    REPORT_NAME,
    flatten,
    read_lines,
    read_settings,
    replace_text,
)

ASSETS = Path(__file__).parent / "assets"
SCRIPTS = ("charts.js", "samples.js", "page.js")
SAMPLE_BYTES = 12_000_000  # of groups and pictures, all runs together
MAX_POINTS = 2000  # of a curve
ROUND_STEPS = (1000, 500, 100, 50, 10, 5)  # kept first where not all steps have room
DIGITS = 6


@dataclass
class RunData:
    """What the page shows of one run: `metrics` has a list as long as `steps` for each name, None where a step lacks
    it; `config` is flat; `changed` are its keys that differ from the defaults; `total` is the run's last step, where
    the configuration tells; `left_out` counts the steps whose groups found no room."""

    name: str
    steps: list[int]
    metrics: dict[str, list[float | None]]
    config: dict[str, Any]
    changed: list[str]
    total: int | None
    groups: list[dict[str, Any]]
    left_out: int = 0


def write_report(paths: Sequence[str | Path], out: str | Path | None = None) -> Path:
    """Replaces the page in one step and returns its path: `out`, or report.html of the only run.

    Raises ConfigError naming every folder that is not a run's.
    """
    folders = [Path(path).expanduser() for path in paths]
    missing = [str(folder) for folder in folders if not (folder / "config.yaml").is_file()]
    if missing:
        raise ConfigError(
            f"no run folder: {', '.join(missing)} (config.yaml is not there). Name folders that training wrote:"
            " trainer.save_checkpoint_path, by default checkpoints/PROJECT/EXPERIMENT."
        )
    assert out is not None or len(folders) == 1, "the page of several runs needs a file name"
    target = folders[0] / REPORT_NAME if out is None else Path(out).expanduser()
    replace_text(target, render(folders))
    return target


def render(folders: Sequence[Path]) -> str:
    """The page of these run folders as text."""
    room = SAMPLE_BYTES // len(folders)
    runs, pictures = [], {}
    for folder, name in zip(folders, _names(folders), strict=True):
        run, its_pictures = _read(folder, name, room)
        runs.append(run)
        pictures |= its_pictures
    data = {"runs": [asdict(run) for run in runs], "pictures": pictures, "defaults": _defaults()}
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    page = environment.from_string(_asset("report.html.jinja"))
    return page.render(
        title=" · ".join(run.name for run in runs),
        single=len(runs) == 1,
        written=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        style=Markup(_asset("style.css")),
        script=Markup("\n".join(map(_asset, SCRIPTS))),
        # "<" as an escape: no text of a model can close the script element
        data=Markup(text.replace("<", "\\u003c")),
    )


@cache
def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


def _read(folder: Path, name: str, room: int) -> tuple[RunData, dict[str, str]]:
    config = read_settings(folder / "config.yaml")
    rows = [row for _, row in read_lines(folder / "metrics.jsonl") if row is not None]
    every = -(-len(rows) // MAX_POINTS) or 1
    rows = rows[::every] + (rows[-1:] if (len(rows) - 1) % every else [])
    names = dict.fromkeys(key for row in rows for key in row if key != "step")
    groups, pictures, left_out = _fitting(folder, room)
    defaults = _defaults()
    run = RunData(
        name=name,
        steps=[row["step"] for row in rows],
        metrics={key: [_rounded(row.get(key)) for row in rows] for key in names},
        config=config,
        changed=[key for key, value in config.items() if key not in defaults or defaults[key] != value],
        total=config.get("trainer.max_steps"),
        groups=groups,
        left_out=left_out,
    )
    return run, pictures


def _fitting(folder: Path, room: int) -> tuple[list[dict[str, Any]], dict[str, str], int]:
    """The groups that find room, in order, their pictures as data URIs, and how many steps found none. The first and
    the last step come first, then round ones."""
    sizes: dict[int, int] = {}
    shown: dict[int, set[str]] = {}
    for line, row in read_lines(folder / GROUPS_NAME):  # twice, so that a long run need not fit into memory
        if row is not None:
            sizes[row["step"]] = sizes.get(row["step"], 0) + len(line)
            shown.setdefault(row["step"], set()).update(row["pictures"])
    ends = {min(sizes, default=0), max(sizes, default=0)}
    urgent = sorted(sizes, key=lambda step: (step not in ends, *(step % size != 0 for size in ROUND_STEPS), -step))
    pictures: dict[str, str] = {}
    kept: set[int] = set()
    for step in urgent:
        new = {name: _data_uri(folder / PICTURES_NAME / name) for name in sorted(shown[step] - pictures.keys())}
        size = sizes[step] + sum(map(len, new.values()))
        if size > room and kept:
            break
        room -= size
        pictures |= new
        kept.add(step)
    groups = [row for _, row in read_lines(folder / GROUPS_NAME) if row is not None and row["step"] in kept]
    return groups, {name: uri for name, uri in pictures.items() if uri}, len(sizes) - len(kept)


def _data_uri(path: Path) -> str:
    """ "" for a picture that is not there: a run folder may have been copied without its pictures."""
    return f"data:image/webp;base64,{base64.b64encode(path.read_bytes()).decode()}" if path.is_file() else ""


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.{DIGITS}g}")


@cache
def _defaults() -> dict[str, Any]:
    return flatten(yaml.safe_load(to_yaml(Config())))


def _names(folders: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that differ."""
    parts = [folder.resolve().parts for folder in folders]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    raise ConfigError(f"a run folder is named twice: {', '.join(map(str, folders))}. Name each once.")


def main(arguments: Sequence[str]) -> None:
    """The command `grpo-vlm report`."""
    parser = argparse.ArgumentParser(
        prog="grpo-vlm report", description="Writes one HTML page with the curves, samples and settings of runs."
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run folder; several are compared")
    parser.add_argument(
        "--out", metavar="FILE", help=f"default: {REPORT_NAME} in the run's folder; of several runs, in this folder"
    )
    options = parser.parse_args(arguments)
    out = options.out or (REPORT_NAME if len(options.runs) > 1 else None)
    print(f"written: {write_report(options.runs, out)}")
