"""`grpo-vlm data check FILE [--config FILE] [key=value ...]`: everything about a data set before training.

Rows and their shape, prompt lengths, sizes of pictures and videos, every fault, and the first rows as they will be
sent. The rows are read by the same code and settings as in training. Without a model the picture processor is
Qwen2.5-VL's and the text is counted by the demo's small tokenizer, which the report says.
"""

import argparse
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from transformers import AutoProcessor

from grpo_vlm.config import Config, load_config
from grpo_vlm.data.dataset import PromptDataset, Verdict
from grpo_vlm.data.lengths import Scan, scan_rows
from grpo_vlm.data.row_sources import parts_of
from grpo_vlm.data.rows import Prompt
from grpo_vlm.data.video import ClipShape
from grpo_vlm.errors import ConfigError

BARS, BAR_WIDTH = 12, 40
SHOWN_ROWS, LONGEST_ROWS = 3, 10
SETTING = re.compile(r"[+~]*\w+(\.\w+)*=")  # as on the command line of train.py: verl's keys and EasyR1's, too
QWEN_SIZE = {"shortest_edge": 3136, "longest_edge": 12845056}  # Qwen2.5-VL's own bounds in pixels
ESTIMATE = (
    "No worker.actor.model.model_path is set: pictures are counted by Qwen2.5-VL's rule (28 pixels a token side), "
    "text by the demo's small tokenizer, which makes more tokens of it than a real one. Give the model for exact "
    "numbers."
)


@dataclass
class Media:
    """What the rows show. Sizes are (width, height) in the file; tokens in the prompt."""

    pictures: list[tuple[int, int]] = field(default_factory=list)
    picture_tokens: list[int] = field(default_factory=list)
    enlarged: int = 0
    shrunk: int = 0
    clips: list[ClipShape] = field(default_factory=list)
    clip_tokens: list[int] = field(default_factory=list)
    without: int = 0


def main(arguments: Sequence[str], load_processor: Callable[[Config], Any], console: Console | None = None) -> int:
    """Command line entry; returns the exit code: 0, or 2 when there are faults. load_processor: of a configuration
    with a model. Raises GRPOVLMError when there is nothing to check."""
    parser = argparse.ArgumentParser(prog="grpo-vlm data", description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("command", choices=("check",))
    parser.add_argument("--config", metavar="FILE")
    parser.add_argument("--config-name", metavar="NAME", action="append", default=[])  # verl's, of Hydra
    parser.add_argument("--config-path", metavar="FOLDER", action="append", default=[])
    parser.add_argument("items", nargs="*", metavar="FILE | key=value", help="PATH[@split],..., and settings")
    options = parser.parse_intermixed_args(arguments)
    overrides = [item for item in options.items if SETTING.match(item) and not Path(item).exists()]
    named = [item for item in options.items if item not in overrides]
    overrides += [f"hydra.config_name={name}" for name in options.config_name]
    overrides += [f"hydra.config_path={folder}" for folder in options.config_path]
    config = load_config(options.config, overrides)
    sources = named or [source for source in (config.data.train_files, config.data.val_files) if source]
    if not sources:
        raise ConfigError("name what to check: grpo-vlm data check FILE, or --config FILE with data.train_files")
    console = console or Console(highlight=False, emoji=False)
    exact = bool(config.worker.actor.model.model_path)
    processor = load_processor(config) if exact else stand_in()
    if not exact:
        console.print(f"[yellow]{ESTIMATE}[/]\n")
    verdicts = [check(source, config.data, processor, console) for source in sources]
    return 2 if any(verdict.faults or not verdict.kept for verdict in verdicts) else 0


def stand_in() -> Any:
    """The demo model's processor with the picture bounds of Qwen2.5-VL."""
    processor = AutoProcessor.from_pretrained(str(files("grpo_vlm") / "demo" / "model"))
    processor.image_processor.size = type(processor.image_processor.size)(**QWEN_SIZE)
    return processor


def check(source: str, settings: Any, processor: Any, console: Console) -> Verdict:
    """Prints the report about one source. settings: the data section. Raises DataError when it cannot be opened."""
    rows = PromptDataset(source, settings, processor)
    media = Media()
    scan = scan_rows(rows.source, rows.builder, rows.workers, lambda *row: _note(media, rows, *row))
    verdict = rows.judge(scan)
    for note in filter(None, [*rows.source.notes, verdict.answer_note(rows.row_id), rows.media_note(scan)]):
        console.print(f"[yellow]note[/] {escape(note)}")
    console.print(_shapes(rows))
    console.print(_balance(scan, verdict, settings))
    usable = sorted(tokens for tokens in scan.tokens if tokens)
    if usable:
        console.print(_histogram(usable, settings.max_prompt_length))
    console.print(_sizes(media))
    _print_rows(console, "Faults", [text for _, text in verdict.faults])
    _print_rows(console, "Left out by data.on_bad_media=skip", [text for _, text in verdict.skipped])
    longest = sorted(verdict.overlong, key=lambda row: -row[1])[:LONGEST_ROWS]
    _print_rows(
        console,
        f"Longest of the {len(verdict.overlong)} rows left out",
        [f"{row_id}: {tokens} tokens" for row_id, tokens in longest],
    )
    if longest:
        console.print(f"[yellow]hint[/] {_ways_out(longest[0][1], settings)}", soft_wrap=True)
    _print_rows(console, "Moving pictures, first frame used", sorted(rows.builder.animated))
    if verdict.kept:
        rows.select(verdict.kept)
        for index in range(min(SHOWN_ROWS, len(rows))):
            console.print(_sent(rows[index]))
    return verdict


def _ways_out(tokens: int, settings: Any) -> str:
    """How rows of so many tokens are kept."""
    return (
        f"training leaves them out, too: data.max_prompt_length={tokens} keeps all rows (now "
        f"{settings.max_prompt_length}), a lower data.max_pixels (now {settings.max_pixels}) or data.min_pixels (now "
        f"{settings.min_pixels}) makes pictures smaller"
    )


def _note(media: Media, rows: PromptDataset, number: int, row: Mapping[str, Any], sizes: Sequence[Any]) -> None:
    rule = rows.builder.size_rule
    media.without += not sizes
    for size in sizes:
        tokens = rows.builder.image_tokens([size])
        if isinstance(size, ClipShape):
            media.clips.append(size)
            media.clip_tokens.append(tokens)
            continue
        width, height = rule.target(*size)
        # within a token's side a picture only snaps to the grid
        media.enlarged += width * height > (size[0] + rule.factor) * (size[1] + rule.factor)
        media.shrunk += (width + rule.factor) * (height + rule.factor) < size[0] * size[1]
        media.pictures.append(size)
        media.picture_tokens.append(tokens)


# ---------------------------------------------------------------- the tables


def _table(title: str, *columns: str, right: Iterable[int] = ()) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number in right else "left", overflow="fold")
    return table


def _shapes(rows: PromptDataset) -> Table:
    table = _table("Sources", "source", "rows", "shape", right=(1,))
    for part in parts_of(rows.source):
        table.add_row(escape(part.name), str(len(part)), escape(rows.schemas[part.name].description))
    return table


def _balance(scan: Scan, verdict: Verdict, settings: Any) -> Table:
    """Rows in = rows out + what is left out, line by line."""
    table = _table("Rows", "", "rows", right=(1,))
    table.add_row("in the source", str(len(scan.tokens)))
    table.add_row(f"longer than {settings.max_prompt_length} tokens, left out", str(len(verdict.overlong)))
    table.add_row("bad picture or video, left out", str(len(verdict.skipped)))
    table.add_row("faulty", str(len(verdict.faults)), style="bold red" if verdict.faults else "")
    table.add_row("usable", str(len(verdict.kept)), style="bold")
    if verdict.unanswered:
        table.add_row("  of them without a right answer", str(len(verdict.unanswered)))
    return table


def _histogram(lengths: Sequence[int], limit: int) -> Table:
    """lengths: ascending."""
    table = _table("Prompt length in tokens, pictures included", "tokens", "rows", "", right=(0, 1))
    width = _step((lengths[-1] - lengths[0]) / BARS)
    counts: dict[int, int] = {}
    for length in lengths:
        counts[length // width] = counts.get(length // width, 0) + 1
    most = max(counts.values())
    for step in range(min(counts), max(counts) + 1):
        count = counts.get(step, 0)
        over = step * width > limit
        bar = "█" * -(-count * BAR_WIDTH // most)
        table.add_row(f"{step * width}-{step * width + width - 1}", str(count), f"[red]{bar}[/]" if over else bar)
    table.caption = f"median {median(lengths):g}, longest {lengths[-1]}, data.max_prompt_length {limit}"
    return table


def _step(width: float) -> int:
    """The next of 1, 2, 5, 10, 20, 50 ..."""
    step = 1
    while step < width:
        step = step * 5 // 2 if str(step).startswith("2") else step * 2
    return step


def _sizes(media: Media) -> Table:
    table = _table("Media", "", "least", "median", "most", right=(1, 2, 3))

    def spread(name: str, values: Sequence[float]) -> None:
        if values:
            table.add_row(name, f"{min(values):g}", f"{median(values):g}", f"{max(values):g}")

    spread("picture width, pixels", [width for width, _ in media.pictures])
    spread("picture height, pixels", [height for _, height in media.pictures])
    spread("picture tokens", media.picture_tokens)
    spread("video frames in the file", [clip.total for clip in media.clips])
    spread("video frames shown", [len(clip.indices) for clip in media.clips])
    spread("video tokens", media.clip_tokens)
    table.caption = (
        f"pictures: {len(media.pictures)} (enlarged: {media.enlarged}, shrunk: {media.shrunk}), "
        f"videos: {len(media.clips)}, rows without either: {media.without}"
    )
    return table


def _print_rows(console: Console, title: str, lines: Sequence[str]) -> None:
    if lines:
        console.print(f"\n[bold]{title}: {len(lines)}[/]")
        for line in lines:
            console.print(f"  {escape(line)}", soft_wrap=True)


def _sent(prompt: Prompt) -> Table:
    """A prompt as the rollout server gets it."""
    table = _table(f"As it will be sent: {escape(prompt.row_id)}", "", "")
    table.add_row("text", escape(prompt.text))
    for number, image in enumerate(prompt.images):
        table.add_row(f"picture {number}", f"{image.width}x{image.height} pixels, RGB")
    for number, clip in enumerate(prompt.videos):
        frames, height, width, _ = clip.frames.shape
        table.add_row(f"video {number}", f"{frames} frames of {width}x{height} pixels")
    table.add_row("tokens", str(len(prompt.token_ids)))
    table.add_row("right answer", escape(prompt.ground_truth))
    table.add_row("other columns", escape(", ".join(prompt.columns)))
    return table
