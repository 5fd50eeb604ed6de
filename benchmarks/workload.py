"""What the benchmarks train on: made-up questions with pictures, made-up answers and scores. All of it is a pure
function of a Workload, so that every program in a comparison gets the same, and nothing needs a network.
"""

import hashlib
import io
import math
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from grpo_vlm.data.prepare import easyvqa_rows
from grpo_vlm.rollout.types import Completion, Request

ROOT = Path(__file__).resolve().parents[1]
DEMO_MODEL = ROOT / "grpo_vlm/demo/model"
DEMO_ROWS_PER_ANSWER = 600  # the rows that the demo trains on
DEMO_VOCABULARY, VOCABULARY = 3072, 151936  # rows of the demo's embedding and of Qwen2.5-VL's
TOKEN_SIDE = 28  # pixels along one side of what becomes one image token
MODELS = ("3b", "7b", "tiny", "demo")  # the first three are random (models.py)


@dataclass(frozen=True)
class Workload:
    """What a step trains on: `prompts` questions, each with one picture of `image_tokens` tokens and `group` answers
    of `shortest` to `longest` tokens. With the demo model the questions and pictures are easy-VQA's."""

    model: str = "3b"
    prompts: int = 16
    group: int = 8
    image_tokens: int = 400
    shortest: int = 100
    longest: int = 500

    @property
    def rollouts(self) -> int:
        return self.prompts * self.group

    @property
    def prompt_limit(self) -> int:
        """An upper bound of a prompt's tokens."""
        return self.image_tokens + 176

    @property
    def side(self) -> int:
        """Pixels along one side of a picture."""
        side = math.isqrt(self.image_tokens)
        if side**2 != self.image_tokens:
            raise SystemExit(
                f"--image-tokens {self.image_tokens}: pictures are square, take a square such as 64 or 400"
            )
        return TOKEN_SIDE * side


@dataclass(frozen=True)
class Question:
    """A question about one picture (PNG bytes)."""

    text: str
    picture: bytes
    answer: str

    def row(self) -> dict:
        """As a row of our data set."""
        return {"problem": f"<image>{self.text}", "images": [{"bytes": self.picture}], "answer": self.answer}


def questions(workload: Workload, count: int) -> list[Question]:
    """The first `count` questions; number n is the same whatever the count. Pictures are noise, which PNG cannot
    shrink: reading them costs what a photograph does."""
    if workload.model == "demo":
        return _demo_questions(count)
    made = []
    for number in range(count):
        pixels = np.random.default_rng((0, number)).integers(0, 255, (workload.side, workload.side, 3), dtype=np.uint8)
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "PNG")  # as datasets stores a picture
        made.append(Question("Find x in the figure. " * 14, file.getvalue(), "x"))
    return made


def _demo_questions(count: int) -> list[Question]:
    rows = easyvqa_rows("train", DEMO_ROWS_PER_ANSWER, seed=0)[:count]
    form = "{} Answer in \\boxed{{}}."
    return [
        Question(form.format(row["problem"].removeprefix("<image>").strip()), row["images"][0]["bytes"], row["answer"])
        for row in rows
    ]


def answers(workload: Workload, number: int) -> list[list[int]]:
    """Token ids of the answers to question `number`: ordinary tokens only, no end token."""
    draw = random.Random(number)
    tokens = DEMO_VOCABULARY if workload.model == "demo" else VOCABULARY
    lengths = [draw.randint(workload.shortest, workload.longest) for _ in range(workload.group)]
    return [[draw.randrange(tokens // 3, 2 * tokens // 3) for _ in range(length)] for length in lengths]


def score(text: str) -> float:
    """A made-up score of [0, 1]. Answers of a group hardly ever get the same, so no group is without a gradient."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=2).digest(), "big") / 65535


def reward(reward_inputs: list[dict]) -> list[dict]:
    """`score` in the form of our reward functions."""
    return [{"overall": score(item["response"])} for item in reward_inputs]


class MadeUpEngine:
    """An engine (grpo_vlm.rollout.engine.Engine) whose answers are ready: a step's time is the training's alone."""

    name = "made-up answers"

    def __init__(self, workload: Workload) -> None:
        self.workload, self.version = workload, -1

    def start(self) -> None:
        """Nothing to start."""

    def sync(self, model: Any, version: int) -> dict[str, float]:
        """Nothing to bring over."""
        self.version = version
        return {}

    def generate(
        self, requests: Sequence[Request], on_progress: Callable[[int], None] | None = None
    ) -> list[list[Completion]]:
        """The answers to the rows that the requests are made of; a row's number stands at the end of its id."""
        numbers = [int(request.prompt.row_id.rpartition(":")[2]) for request in requests]
        return [
            [Completion(tuple(ids), (0.0,) * len(ids), "length", "", self.version) for ids in row]
            for row in (answers(self.workload, number) for number in numbers)
        ]

    def metrics(self) -> dict[str, float]:
        """Nothing can fall."""
        return {}

    def release(self) -> None:
        """Nothing is held."""

    def close(self) -> None:
        """Nothing to stop."""


def model_folder(name: str, root: Path) -> Path:
    """Where the model of this name is; a random one after models.py has written it there."""
    return DEMO_MODEL if name == "demo" else root / f"grpo_vlm-random-{name}"
