"""Run by test_resume_sharded.py: tiny runs that stop and go on, each in processes of its own, forked so that the
imports are paid for once.

`python -m tests.training.resumed ROOT JOB ...`, a job is "SCHEME FOLDER HOW": the scheme of accelerate_configs/ ("cpu"
is one process, the others two), the run's folder below ROOT, and HOW is `on` to the end, `stop` by a signal to one
process after step 2, or `again`: go on, and write what was restored as checkpoint 1, before anything moves.
"""

import hashlib
import json
import os
import signal
import sys
from pathlib import Path

import torch
from torch.multiprocessing import start_processes
from transformers import TrainerCallback

from grpo_vlm.config import load_and_check
from grpo_vlm.rollout.types import Completion
from grpo_vlm.rollout.weights import gathered, weights
from grpo_vlm.training import checkpoint
from grpo_vlm.training.session import Session
from tests.tiny import tiny_model
from tests.training.hashed import hashed_reward
from tests.training.rigs import rows, values
from tests.training.sharded import RANKS, FixedEngine, environment, free_port


class Weighed(FixedEngine):
    """Answers that depend on every bit of the weights too, as sampled ones do; with `loose` on the row alone."""

    def __init__(self, trainer, loose: bool):
        model = trainer.model.config.get_text_config()
        super().__init__(model.vocab_size, trainer.learner.scorer.banned_ids)
        self.accelerator, self.loose, self.digest = trainer.accelerator, loose, 0

    def sync(self, model, version):
        """See Engine."""
        found = hashlib.sha256()
        for _, tensor in gathered(weights(model, self.accelerator), self.accelerator):
            found.update(tensor.cpu().numpy().tobytes())
        self.digest = 0 if self.loose else int.from_bytes(found.digest()[:4], "big")
        return {}

    def _answer(self, request, child):
        return super()._answer(request, child + self.digest)


class StopAfter(TrainerCallback):
    """A signal to the second process, or the only one, when step 2 is done."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 4 and args.process_index == args.world_size - 1:
            os.kill(os.getpid(), signal.SIGUSR1 if args.world_size > 1 else signal.SIGTERM)


class SaveAgain(TrainerCallback):
    """Writes the restored state before the first step."""

    def __init__(self, trainer):
        self.trainer = trainer

    def on_step_begin(self, args, state, control, **kwargs):
        checkpoint.save(self.trainer, 1, score=None)
        self.trainer.saver.settle()
        self.trainer.remove_callback(self)


def work(rank: int, root: Path, scheme: str, folder: str, how: str, port: int) -> None:
    """One process of a job."""
    os.environ.update(environment(scheme, rank, port))
    torch.set_num_threads(1)
    case = {"worker.actor.model.lora.rank": 4, "worker.actor.model.lora.alpha": 8} if "lora" in folder else {}
    changes = {
        "worker.actor.global_batch_size": 2,
        "worker.actor.optim.lr": 1e-3,
        "worker.actor.optim.lr_scheduler_type": "cosine",
        "worker.actor.optim.lr_warmup_steps": 1,
        "algorithm.disable_kl": False,
        "algorithm.kl_type": "adaptive",
        "algorithm.ref_model_sync_steps": None if case else 2,
        "trainer.max_steps": 4,
        "trainer.val_before_train": False,
        **case,
    }
    config, _ = load_and_check(
        None,
        (),
        values(root, root / folder, **changes),
        needs_train_files=False,
        needs_reward=False,
        has_val_rows=True,
        world_size=1 if scheme == "cpu" else RANKS,
    )
    with Session(config, train_rows=rows(12), reward=hashed_reward) as session:
        trainer = session.trainer
        trainer.engine = trainer.collector.engine = Weighed(trainer, loose="loose" in folder)
        if how == "stop":
            trainer.add_callback(StopAfter())
        if how == "again":
            trainer.add_callback(SaveAgain(trainer))
        session.train()
        assert trainer.rollout_step == (2 if how == "stop" else 4)
        if how == "on":
            score(trainer, root / folder / "scored.json")


def score(trainer, path: Path) -> None:
    """Writes what the trained model thinks of an answer to a row with a picture."""
    banned = trainer.learner.scorer.banned_ids
    ids = [number for number in range(40, 60) if number not in banned]
    (prompt,) = trainer.prompts.build([0])
    completion = Completion(tuple(ids), (0.0,) * len(ids), "length", "", 0)
    found = trainer.learner.score_one(trainer.model_wrapped, prompt, completion)
    if trainer.accelerator.is_main_process:
        path.write_text(json.dumps({"row": 0, "ids": ids, "banned": list(banned), "logprobs": found[: len(ids)]}))


if __name__ == "__main__":
    place = Path(sys.argv[1])
    tiny_model("qwen2_5_vl", place)
    for job in sys.argv[2:]:
        kind, target, manner = job.split()
        processes = 1 if kind == "cpu" else RANKS
        start_processes(work, (place, kind, target, manner, free_port()), nprocs=processes, start_method="fork")
        print(f"{job} ok", flush=True)
