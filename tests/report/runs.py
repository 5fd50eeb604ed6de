"""A run folder as training leaves it, made without training: geometry problems with their pictures, answers of the
kinds that occur, scored by the geometry reward."""

import io
import math
import runpy
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow.parquet
from PIL import Image

from grpo_vlm.config import load_config, to_yaml
from grpo_vlm.report import RunFolder, Sample, StepRecord
from grpo_vlm.report.groups import Answer, ShownGroup, pick, thumbnail

ROOT = Path(__file__).parents[2]
GEO3K = ROOT / "tests" / "data" / "geo3k_40.parquet"
HOSTILE = '</script><img src=x onerror="document.title=1"> \u2028 <b>bold</b>'
PROMPTS, ANSWERS = 8, 4


@cache
def problems() -> list[dict[str, Any]]:
    return pyarrow.parquet.read_table(GEO3K).to_pylist()


def answers(row: dict[str, Any], skill: int) -> list[str]:
    """The first `skill` of four answers are right; the others wrong, without an end, or without a box."""
    right = f"<think>The angles of the figure add up.</think>\\boxed{{{row['answer']}}}"
    wrong = next(choice for choice in row["choices"] if choice != row["answer"])
    faulty = [f"It must be \\boxed{{{wrong}}}", "<think>" + "so x = 2 and " * 100, f"I think {wrong}. {HOSTILE}", "?"]
    return [right] * skill + faulty[skill:]


def groups_of(step: int, split: str = "train") -> list[ShownGroup]:
    """A few of the step's groups, with their pictures."""
    score = runpy.run_path(str(ROOT / "rewards" / "geo3k.py"))["compute_score"]
    made = []
    for place in range(PROMPTS):
        row = problems()[(step * PROMPTS + place) % 40]
        texts = answers(row, (step // 4 + place) % (ANSWERS + 1))
        inputs = [{"response": text, "prompt_text": "", "ground_truth": row["answer"]} for text in texts]
        scores = score(inputs)
        mean = sum(one["overall"] for one in scores) / ANSWERS
        name = f"geo3k.parquet:{place}"
        shown = [
            Answer.of(
                Sample(
                    step,
                    split,
                    name,
                    "",
                    text,
                    row["answer"],
                    one,
                    None if split == "val" else one["overall"] - mean,
                    len(text) // 4,
                    "length" if text.startswith("<think>so") else "stop",
                ),
                one["overall"],
            )
            for text, one in zip(texts, scores, strict=True)
        ]
        picture = Image.open(io.BytesIO(row["images"][0]["bytes"])).convert("RGB")
        question = (("system", "Reason step by step."), ("user", row["problem"].replace("<image>", "[picture]")))
        made.append(
            ShownGroup(
                step,
                split,
                name,
                "",
                question,
                row["answer"],
                tuple(shown),
                (thumbnail(picture, f"{row['source_id']:032x}"),),
            )
        )
    chosen = pick([[answer.reward for answer in group.answers] for group in made], 6)
    return [made[place] for place in chosen]


def record(step: int, *, groups: bool = True, level: float = 0.0) -> StepRecord:
    """A step's numbers under the names that training gives them."""
    rise = 1 - math.exp(-(step + 1) / 8) + level
    seconds = {"gen": 3.1 - rise, "reward": 0.2, "update_actor": 2.0, "sync": 0.1, "step": 5.4}
    metrics = {
        "reward/overall": rise * 0.9,
        "reward/accuracy": rise * 0.8,
        "reward/format": rise,
        "reward/not_scored": 0.0,
        "group/reward_best": min(1.0, rise + 0.2),
        "group/reward_std": 0.3 * (1 - rise),
        "group/zero_variance_share": rise / 3,
        "critic/advantages/max": 1.5,
        "critic/advantages/min": -1.5,
        "actor/kl_loss": rise / 100,
        "actor/ppo_kl": rise / 1000,
        "actor/entropy_loss": 1.2 - rise,
        "actor/pg_clipfrac_higher": 0.002 * rise,
        "actor/pg_clipfrac_lower": 0.001,
        "actor/grad_norm": 1.0,
        "actor/pg_loss": float("nan") if step == 3 else -0.1 * rise,
        "actor/lr": 1e-6,
        "response_length/mean": 200 + 10 * rise,
        "response_length/max": 512,
        "response_length/clip_ratio": 0.1,
        "prompt_length/mean": 300,
        "perf/time_per_step": 5.4,
        "perf/throughput": 5000 * rise,
        "perf/rollouts_per_s_per_gpu": 12.0,
        "perf/cpu_memory_used_gb": 7.5,
    }
    if step % 5 == 0:
        metrics |= {"val/reward_score": rise * 0.7, "val/accuracy_reward": rise * 0.6, "val/mean@4": rise * 0.7}
    return StepRecord(step, metrics, [], seconds, groups_of(step) if groups else [])


def make_run(path: Path, steps: int = 12, *, overrides: tuple[str, ...] = (), groups: bool = True) -> Path:
    """A finished run of `steps` steps."""
    config = load_config(None, ["data.train_files=geo3k.parquet@train", f"trainer.max_steps={steps}", *overrides])
    folder = RunFolder.open(path, resume_step=None, config_yaml=to_yaml(config))
    for step in range(1, steps + 1):
        folder.append(record(step, groups=groups))
    folder.close()
    return path
