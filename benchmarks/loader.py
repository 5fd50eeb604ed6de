"""What it costs to bring pictures from a data set to a training step: our loader and TRL's GRPO loader on the same
rows, and our memory on a set that is larger than it.

    python benchmarks/loader.py speed --data GEO3K.parquet --out FILE.json
    python benchmarks/loader.py memory --gigabytes 5 --out FILE.json

speed: one optimizer step of `--accumulation` micro-batches with groups of `--group` answers, repeated. TRL's loader is
taken from a GRPOTrainer; what it hands over are decoded pictures. Ours hands over prompts whose pictures are also
fitted to the patch grid and processed. Decodes are counted where Pillow decodes.
memory: a parquet file of pictures of noise, checked as a whole and then drawn in random order; beside it `datasets`.
Each part runs in a process of its own.
"""

import argparse
import io
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image, ImageFile

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measure import GB, Result
from benchmarks.summary import median, write_json
from grpo_vlm.config import Config
from grpo_vlm.data import PromptDataset, rollout_rows
from grpo_vlm.data.check import QWEN_SIZE, stand_in
from grpo_vlm.data.workers import PromptPool

PICTURES = 64  # different ones in the made-up set
PICTURE_SIZE = (512, 384)  # of noise: 590 kB as PNG
DRAWN = 1000
SAMPLE_S = 0.02


@contextmanager
def counted_decodes() -> Iterator[Counter]:
    """Counts the pictures whose pixels Pillow really decodes within the block."""
    counts: Counter = Counter()
    load = ImageFile.ImageFile.load

    def counting(self: ImageFile.ImageFile) -> Any:
        counts["decodes"] += bool(self.tile)
        return load(self)

    ImageFile.ImageFile.load = counting
    try:
        yield counts
    finally:
        ImageFile.ImageFile.load = load


@contextmanager
def watched_memory() -> Iterator[dict[str, float]]:
    """The largest resident set of this process within the block, what it was before, and the largest of a process that
    it starts, in GB."""
    process, over = psutil.Process(), threading.Event()
    found = {"before_gb": process.memory_info().rss / GB, "peak_gb": 0.0, "peak_child_gb": 0.0}

    def watch() -> None:
        while not over.wait(SAMPLE_S):
            found["peak_gb"] = max(found["peak_gb"], process.memory_info().rss / GB)
            for child in process.children():
                with suppress(psutil.NoSuchProcess):
                    found["peak_child_gb"] = max(found["peak_child_gb"], child.memory_info().rss / GB)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()


# ---------------------------------------------------------------- speed


def time_ours(options: argparse.Namespace, result: Result) -> None:
    """Steps of our loader: every prompt of a step once, whatever the group and the accumulation."""
    small = QWEN_SIZE["shortest_edge"]  # pictures keep their size, as with TRL
    config = replace(Config().data, prompt_key="problem", min_pixels=small, max_prompt_length=4096)
    began = time.perf_counter()
    rows = PromptDataset(str(options.data), config, stand_in())
    with counted_decodes() as counts:
        rows.validate()
    result.values["check"] = {"rows": len(rows.source), "seconds": time.perf_counter() - began, **counts}
    pool, prompts = PromptPool(0), options.batch * options.accumulation // options.group
    for step in range(options.steps):
        with counted_decodes() as counts:
            began = time.perf_counter()
            indices = rollout_rows(len(rows), prompts, step, shuffle=True, seed=1)
            images = sum(len(prompt.images) for prompt in pool.prompts(rows, indices))
            _note(result, step, time.perf_counter() - began, counts["decodes"], images)


def time_trl(options: argparse.Namespace, result: Result) -> None:
    """Steps of the loader of TRL's GRPOTrainer on the same rows."""
    from transformers import AutoModelForImageTextToText, AutoProcessor
    from trl import GRPOConfig, GRPOTrainer

    from tests.tiny import tiny_model

    table = pq.read_table(options.data)
    asked = [[{"role": "user", "content": text.replace("<image>", "")}] for text in table["problem"].to_pylist()]
    rows = datasets.Dataset.from_dict({"prompt": asked, "image": [cell[0] for cell in table["images"].to_pylist()]})
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_model("qwen2_5_vl", folder)
        trainer = GRPOTrainer(
            model=AutoModelForImageTextToText.from_pretrained(model),
            reward_funcs=lambda completions, **columns: [0.0] * len(completions),
            args=GRPOConfig(
                output_dir=folder,
                use_cpu=True,
                bf16=False,
                report_to=[],
                per_device_train_batch_size=options.batch,
                gradient_accumulation_steps=options.accumulation,
                num_generations=options.group,
            ),
            train_dataset=rows.cast_column("image", datasets.Image()),
            processing_class=AutoProcessor.from_pretrained(model),
        )
        batches = iter(trainer.get_train_dataloader())
        for step in range(options.steps):
            with counted_decodes() as counts:
                began = time.perf_counter()
                questions = {
                    (str(row["prompt"]), row["image"].size)
                    for _ in range(options.accumulation)
                    for row in next(batches)
                }
                _note(result, step, time.perf_counter() - began, counts["decodes"], len(questions))


def _note(result: Result, step: int, seconds: float, decodes: int, images: int) -> None:
    row = {"step": step, "wall_s": seconds, "decodes": decodes, "images": images, "images_per_s": images / seconds}
    result.values["steps"].append(row)
    result.write()
    print(f"  step {step}: {images} images, {decodes} decodes, {seconds:.2f} s", flush=True)


# ---------------------------------------------------------------- memory


def write_noise(path: Path, size: float, group_rows: int) -> int:
    """A parquet file of about `size` bytes in EasyR1's shape, in row groups of group_rows; returns its rows."""
    draw = np.random.default_rng(0)
    pictures = []
    for _ in range(PICTURES):
        file = io.BytesIO()
        Image.fromarray(draw.integers(0, 256, (*PICTURE_SIZE[::-1], 3), np.uint8)).save(file, "PNG")
        pictures.append(file.getvalue())
    count = int(size // len(pictures[0]))
    kind = pa.list_(pa.struct({"bytes": pa.binary(), "path": pa.string()}))
    schema = pa.schema({"images": kind, "problem": pa.string(), "answer": pa.string()})
    with pq.ParquetWriter(path, schema, use_dictionary=False) as writer:
        for first in range(0, count, group_rows):
            numbers = range(first, min(first + group_rows, count))
            parts = [numbers[start : start + 1000] for start in range(0, len(numbers), 1000)]  # below Arrow's 2 GB
            tables = [
                pa.Table.from_pylist(
                    [
                        {
                            "images": [{"bytes": pictures[number % PICTURES], "path": None}],
                            "problem": f"<image>Question {number}?",
                            "answer": str(number),
                        }
                        for number in part
                    ],
                    schema=schema,
                )
                for part in parts
            ]
            writer.write_table(pa.concat_tables(tables), row_group_size=group_rows)
    return count


def _largest_group_gb(path: Path) -> float:
    about = pq.read_metadata(path)
    return max(about.row_group(number).total_byte_size for number in range(about.num_row_groups)) / GB


def measure_ours(options: argparse.Namespace, result: Result) -> None:
    """Opens, checks and draws from the set."""
    config = replace(Config().data, prompt_key="problem", filter_overlong_prompts_workers=2)
    processor = stand_in()
    with watched_memory() as memory:
        for phase in ("open", "check", "draw"):
            began = time.perf_counter()
            if phase == "open":
                rows = PromptDataset(str(options.data), config, processor)
            elif phase == "check":
                report = rows.validate()
            else:
                for row in random.Random(0).sample(range(len(rows)), min(DRAWN, len(rows))):
                    rows.source.rows(row, row + 1)
                prompts = rows.prompts(random.Random(1).sample(range(len(rows)), 32))
            result.values["steps"].append({"phase": phase, "wall_s": time.perf_counter() - began, **memory})
            result.write()
    result.values |= {"rows": report.rows, "kept": len(report.kept), "drawn": len(prompts), "memory": memory}


def measure_datasets(options: argparse.Namespace, result: Result) -> None:
    """The same draws through `datasets`, which maps an Arrow copy of the file into memory."""
    with watched_memory() as memory:
        began = time.perf_counter()
        rows = datasets.load_dataset(
            "parquet", data_files=str(options.data), split="train", cache_dir=os.environ["GRPO_VLM_CACHE"]
        ).with_format("arrow")
        result.values["steps"].append({"phase": "open", "wall_s": time.perf_counter() - began, **memory})
        began = time.perf_counter()
        for row in random.Random(0).sample(range(len(rows)), len(rows)):
            rows[row : row + 1].to_pylist()
        result.values["steps"].append({"phase": "draw all", "wall_s": time.perf_counter() - began, **memory})
    result.values |= {"rows": len(rows), "memory": memory}


PARTS = {"ours": time_ours, "trl": time_trl, "memory_ours": measure_ours, "memory_datasets": measure_datasets}


def run_part(name: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One part in a process of its own, with an empty cache; its result."""
    file = folder / f"{name}.json"
    command = [sys.executable, __file__, name, "--out", str(file), "--data", str(options.data)]
    for key in ("steps", "batch", "accumulation", "group"):
        command += [f"--{key}", str(vars(options)[key])]
    environment = os.environ | {"GRPO_VLM_CACHE": str(folder / f"cache-{name}")}
    print(f"{name}:", flush=True)
    code = subprocess.run(command, env=environment, check=False).returncode
    values = json.loads(file.read_text(encoding="utf-8"))
    return values | {"exit_code": code}


def main() -> int:
    """Runs one part, or all of "speed" or "memory"."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=("speed", "memory", *PARTS))
    parser.add_argument("--data", type=Path, help="parquet in EasyR1's shape; memory: made up when left out")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--batch", type=int, default=8, help="samples of a micro-batch")
    parser.add_argument("--accumulation", type=int, default=16, help="micro-batches of a step")
    parser.add_argument("--group", type=int, default=8, help="answers to a question")
    parser.add_argument("--gigabytes", type=float, default=5.0, help="size of the made-up set")
    parser.add_argument("--group-rows", type=int, default=1000, help="rows of its row groups, 0.59 MB each")
    options = parser.parse_args()
    if options.what in PARTS:
        result = Result(options.out)
        with result.guarded():
            PARTS[options.what](options, result)
        return 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        summary: dict[str, Any] = {
            "command": " ".join(["python", "benchmarks/loader.py", *(Path(item).name for item in sys.argv[1:])])
        }
        if options.what == "memory":
            options.data = folder / "noise.parquet"
            summary |= {"rows": write_noise(options.data, options.gigabytes * GB, options.group_rows)}
            summary |= {"file_gb": options.gigabytes, "row_group_gb": _largest_group_gb(options.data)}
            parts = ("memory_ours", "memory_datasets")
        else:
            parts = ("ours", "trl")
        summary |= {part: run_part(part, options, folder) for part in parts}
    if options.what == "speed":
        ours, trl = summary["ours"]["steps"], summary["trl"]["steps"]
        summary["summary"] = {
            "decodes_fewer": median(trl, "decodes") / median(ours, "decodes"),
            "wall_less": median(trl, "wall_s") / median(ours, "wall_s"),
            "images_per_s": {"ours": median(ours, "images_per_s"), "trl": median(trl, "images_per_s")},
        }
    else:
        summary["summary"] = {part: summary[part].get("memory", summary[part]["error"]) for part in parts}
    write_json(options.out, summary)
    print(summary["summary"])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
