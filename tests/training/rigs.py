"""Small runs for the tests of this folder: a tiny model, a dozen rows with pictures, the embedded transformers
engine."""

from pathlib import Path

import torch
from PIL import Image

from grpo_vlm.config import Config, load_and_check
from grpo_vlm.training.session import Session
from tests.tiny import tiny_model
from tests.training.hashed import hashed_reward


def rows(count: int) -> list[dict]:
    """Rows with no, one or two pictures of different sizes."""
    generator = torch.Generator().manual_seed(11)
    made = []
    for number in range(count):
        pictures = []
        for _ in range((1, 1, 0, 2)[number % 4]):
            width, height = (int(56 + 28 * torch.randint(0, 3, (), generator=generator)) for _ in range(2))
            pixels = torch.randint(0, 256, (height, width, 3), generator=generator, dtype=torch.uint8)
            pictures.append(Image.fromarray(pixels.numpy()))
        made.append({"problem": "<image>" * len(pictures) + f"Question {number}?", "images": pictures, "answer": "x"})
    return made


def values(root: Path, folder: Path, **changes) -> dict:
    """Keys and values: 4 prompts x 4 answers, at most 8 tokens, float32."""
    return {
        "data.prompt_key": "problem",
        "data.min_pixels": 3136,
        "data.max_pixels": 50176,
        "data.max_prompt_length": 256,
        "data.max_response_length": 8,
        "data.rollout_batch_size": 4,
        "worker.actor.global_batch_size": 4,
        "worker.actor.micro_batch_size_per_device_for_update": 4,
        "worker.actor.micro_batch_size_per_device_for_experience": 4,
        "worker.actor.model.model_path": str(tiny_model("qwen2_5_vl", root)),
        "worker.actor.model.enable_gradient_checkpointing": False,
        "worker.actor.optim.lr": 1e-4,
        "worker.rollout.name": "transformers",
        "worker.rollout.n": 4,
        "algorithm.disable_kl": True,
        "trainer.max_steps": 1,
        "trainer.save_freq": -1,
        "trainer.logger": ["file"],
        "trainer.save_checkpoint_path": str(folder),
        **changes,
    }


def settings(root: Path, folder: Path, **changes) -> Config:
    """A checked configuration of `values`."""
    given = values(root, folder, **changes)
    config, _ = load_and_check(None, (), given, needs_train_files=False, needs_reward=False, has_val_rows=True)
    return config


def session(config: Config, count: int = 12) -> Session:
    """The parts of a run over `count` rows, not started."""
    return Session(config, train_rows=rows(count), reward=hashed_reward)


def parameters(trainer) -> dict[str, torch.Tensor]:
    """A copy of all weights."""
    return {name: value.detach().clone() for name, value in trainer.model.named_parameters()}


def largest_difference(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    """Largest absolute difference of two sets of weights with the same names."""
    assert left.keys() == right.keys()
    return max((left[name] - right[name]).abs().max().item() for name in left)
