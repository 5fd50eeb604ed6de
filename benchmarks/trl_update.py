"""One measuring process of update.py: stock TRL's GRPOTrainer on the same made-up rollouts, training only.

python benchmarks/trl_update.py --workloads '[{"prompts": 16}]' --folder MODEL --results FILE.json
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, Image
from transformers import AutoModelForImageTextToText, AutoProcessor
from trl import GRPOConfig, GRPOTrainer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measure import Result, StepClock, part_parser
from benchmarks.workload import Question, Workload, answers, questions, score


def dataset(asked: list[Question]) -> Dataset:
    """Conversations with one picture each, which TRL decodes as it reads them."""
    rows = [
        {"prompt": [{"role": "user", "content": question.text}], "image": {"bytes": question.picture, "path": None}}
        for question in asked
    ]
    return Dataset.from_list(rows).cast_column("image", Image())


class ReadyRollouts:
    """TRL's rollout_func. Each call has the next `prompts` questions in order, each `group` times in a row."""

    def __init__(self, workload: Workload) -> None:
        self.workload, self.calls = workload, 0
        self.sizes: dict[str, int] = {}  # of the last call

    def __call__(self, batch: list, trainer: GRPOTrainer) -> dict[str, Any]:
        first = self.calls * self.workload.prompts
        self.calls += 1
        drawn = [ids for place in range(self.workload.prompts) for ids in answers(self.workload, first + place)]
        assert len(batch) == len(drawn), f"TRL asked for {len(batch)} answers at once, {len(drawn)} are made up"
        prompt_ids, _, _ = trainer._tokenize_prompts(batch)
        asked = prompt_ids[:: self.workload.group]
        self.sizes = {"prompt_tokens": sum(map(len, asked)), "scored_tokens": sum(map(len, drawn))}
        return {"prompt_ids": prompt_ids, "completion_ids": drawn, "logprobs": [[0.0] * len(ids) for ids in drawn]}

    def describe(self, row: dict[str, Any]) -> None:
        """Adds the sizes of the step's rollouts to what was measured of it."""
        row |= self.sizes


def scores(completions: list, **columns: Any) -> list[float]:
    """The same made-up scores of the same texts."""
    return [score(messages[0]["content"]) for messages in completions]


def trainer_arguments(options: argparse.Namespace, workload: Workload, folder: str, last: int) -> GRPOConfig:
    """TRL's defaults, as a user would have them for this workload."""
    on_cpu = options.device == "cpu"
    return GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=options.micro_batch,
        gradient_accumulation_steps=workload.rollouts // options.micro_batch,
        num_generations=workload.group,
        max_completion_length=workload.longest + 12,
        max_steps=last,
        shuffle_dataset=False,  # so that a step has the questions that ours has
        bf16=not on_cpu,
        use_cpu=on_cpu,
        gradient_checkpointing=False,
        beta=0.0,
        learning_rate=1e-6,
        optim="adamw_torch" if on_cpu else "adamw_torch_fused",
        logging_steps=1000,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )


def measure(options: argparse.Namespace) -> None:
    """Trains and writes the result file."""
    (fields,), (file,) = json.loads(options.workloads), options.results
    workload = Workload(**fields)
    result = Result(file, part="trl", workload=vars(workload), micro_batch=options.micro_batch)
    last = options.warmup + options.steps
    dtype = torch.float32 if options.device == "cpu" else torch.bfloat16
    with result.guarded(), tempfile.TemporaryDirectory() as folder:
        rollouts, clock = ReadyRollouts(workload), StepClock(result, last=last)
        model = AutoModelForImageTextToText.from_pretrained(options.folder, dtype=dtype, attn_implementation="sdpa")
        trainer = GRPOTrainer(
            model=model.to(options.device),
            processing_class=AutoProcessor.from_pretrained(options.folder, padding_side="left"),  # as TRL itself does
            train_dataset=dataset(questions(workload, workload.prompts * last)),
            reward_funcs=scores,
            rollout_func=rollouts,
            args=trainer_arguments(options, workload, folder, last),
        )
        clock.on_border = rollouts.describe
        trainer.add_callback(clock)
        trainer.train()


def arguments() -> argparse.Namespace:
    """What update.py passes on."""
    parser = part_parser(__doc__.splitlines()[0], warmup=1, steps=3)
    parser.add_argument("--micro-batch", type=int, default=8, help="samples of a forward and backward pass")
    return parser.parse_args()


if __name__ == "__main__":
    measure(arguments())
