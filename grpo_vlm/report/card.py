"""The model card of an exported model: what it was made from, with which reward, data and settings, and how its reward
rose."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

CURVE_NAME = "reward.svg"
TRAINED, HELD_OUT = "reward/overall", "val/reward_score"
WIDTH, HEIGHT, LEFT, BOTTOM = 640, 260, 48, 30  # pixels of the picture and of its margins
COLOURS = {TRAINED: "#1f77b4", HELD_OUT: "#d62728"}


def write_card(
    folder: Path,
    *,
    title: str,
    settings: Mapping[str, Any],
    facts: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    adapter: bool,
) -> None:
    """README.md and the curve's picture.

    title: the model's name. settings: the run's configuration under dotted keys. facts: the checkpoint's manifest.
    rows: the lines of metrics.jsonl. adapter: the folder holds an adapter and not a whole model.
    """
    rows = [row for row in rows if row["step"] <= facts["step"]]
    curves = {name: [(row["step"], row[name]) for row in rows if name in row] for name in (TRAINED, HELD_OUT)}
    curves = {name: points for name, points in curves.items() if points}
    (folder / CURVE_NAME).write_text(draw(curves), encoding="utf-8")
    parts = [_front(settings, facts, adapter), _summary(title, settings, facts, curves), _use(adapter)]
    text = yaml.safe_dump(dict(settings), sort_keys=False, allow_unicode=True)
    parts.append(f"## Configuration\n\nEvery value of the run, as `grpo-vlm train` reads it:\n\n```yaml\n{text}```\n")
    (folder / "README.md").write_text("\n".join(parts), encoding="utf-8")


def _front(settings: Mapping[str, Any], facts: Mapping[str, Any], adapter: bool) -> str:
    base = facts["base_model"]
    front = {
        "library_name": "peft" if adapter else "transformers",
        "pipeline_tag": "image-text-to-text",
        "tags": list(dict.fromkeys(["grpo-vlm", "grpo", settings["algorithm.adv_estimator"]])),
    }
    if not Path(base).is_absolute():  # a folder of somebody's machine means nothing elsewhere
        front = {"base_model": base, **front}
    return f"---\n{yaml.safe_dump(front, sort_keys=False)}---\n"


def _summary(
    name: str, settings: Mapping[str, Any], facts: Mapping[str, Any], curves: Mapping[str, Sequence[tuple[int, float]]]
) -> str:
    base, rank = Path(facts["base_model"]), settings["worker.actor.model.lora.rank"]
    prompts, answers = settings["data.rollout_batch_size"], settings["worker.rollout.n"]
    listed = {
        "Base model": base.name if base.is_absolute() else str(base),
        "Trained": f"LoRA of rank {rank}" if rank else "all weights that are not frozen",
        "Method": f"{settings['algorithm.adv_estimator']}, loss {settings['worker.actor.loss_type'] or 'default'}",
        "Steps": f"{facts['step']}, each {prompts} prompts x {answers} answers",
        "Learning rate": settings["worker.actor.optim.lr"],
        "Reward": _reward(settings),
        "Training data": _short(settings["data.train_files"]),
        "Held-out data": _short(settings["data.val_files"]),
    }
    scores = {
        "Reward in training": curves.get(TRAINED),
        "Reward on held-out data": curves.get(HELD_OUT),
    }
    for label, points in scores.items():
        if points:
            (first, before), (last, after) = points[0], points[-1]
            listed[label] = f"{before:.3f} (step {first}) -> {after:.3f} (step {last})"
    table = "\n".join(f"| {label} | {value} |" for label, value in listed.items())
    return f"# {name}\n\nTrained with grpo-vlm.\n\n| | |\n| --- | --- |\n{table}\n\n![reward]({CURVE_NAME})\n"


def _reward(settings: Mapping[str, Any]) -> str:
    """The reward functions without the folders they lie in."""
    given = settings["worker.reward.reward_function"]
    names = given if isinstance(given, list) else [given]
    return ", ".join(f"`{Path(str(name)).name}`" if name else "a function given in Python" for name in names)


def _short(files: Any) -> str:
    """Names of data without the folders they lie in."""
    names = files if isinstance(files, list) else [files]
    plain = [str(name) if not str(name).startswith("/") else Path(str(name)).name for name in names if name]
    return ", ".join(f"`{name}`" for name in plain) or "rows given in Python or none"


def _use(adapter: bool) -> str:
    loads = (
        "model = AutoModelForImageTextToText.from_pretrained(BASE)\nmodel = PeftModel.from_pretrained(model, FOLDER)"
        if adapter
        else "model = AutoModelForImageTextToText.from_pretrained(FOLDER)"
    )
    imported = "from peft import PeftModel\n" if adapter else ""
    serve = "vllm serve BASE --enable-lora --lora-modules trained=FOLDER" if adapter else "vllm serve FOLDER"
    return (
        "## Use\n\n```python\n"
        f"{imported}from transformers import AutoModelForImageTextToText, AutoProcessor\n\n"
        f"processor = AutoProcessor.from_pretrained(FOLDER)\n{loads}\n```\n\nor `{serve}`.\n"
    )


def draw(curves: Mapping[str, Sequence[tuple[int, float]]]) -> str:
    """The curves {name: [(step, value), ...]} as an SVG picture with the range of both axes."""
    points = [point for curve in curves.values() for point in curve]
    (low_x, high_x), (low, high) = (_range([point[axis] for point in points]) for axis in (0, 1))

    def place(point: tuple[int, float]) -> str:
        x = LEFT + (point[0] - low_x) / (high_x - low_x) * (WIDTH - LEFT - 10)
        y = HEIGHT - BOTTOM - (point[1] - low) / (high - low) * (HEIGHT - BOTTOM - 26)
        return f"{x:.1f},{y:.1f}"

    lines = [
        f'<polyline fill="none" stroke="{COLOURS[name]}" stroke-width="2" points="{" ".join(map(place, curve))}"/>'
        f'<text x="{LEFT + 200 * number}" y="16" fill="{COLOURS[name]}">{name}</text>'
        for number, (name, curve) in enumerate(curves.items())
    ]
    base = HEIGHT - BOTTOM
    axes = (
        f'<path d="M{LEFT},26 V{base} H{WIDTH - 10}" fill="none" stroke="#888"/>'
        f'<text x="2" y="32">{high:.3g}</text><text x="2" y="{base}">{low:.3g}</text>'
        f'<text x="{LEFT}" y="{HEIGHT - 10}">{low_x:g}</text>'
        f'<text x="{WIDTH - 60}" y="{HEIGHT - 10}">step {high_x:g}</text>'
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif"'
        f' font-size="13"><rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>{axes}{"".join(lines)}</svg>\n'
    )


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values, default=0.0), max(values, default=1.0)
    return (low, high) if high > low else (low - 0.5, high + 0.5)
