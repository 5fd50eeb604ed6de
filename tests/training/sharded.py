"""Run by test_sharding.py: a tiny run under several schemes, each in processes of its own, with the variables that
`accelerate launch` gives them for a file of accelerate_configs/.

`python -m tests.training.sharded FOLDER KIND CASE STEPS SCHEME ...` leaves FOLDER/SCHEME.pt: the weights after the
last update, gathered as for the server, and what each rank saw of the sharding. SCHEME is a file's name; "-dropped"
after it loses a row on the last rank, "-sleeping" lets that rank sleep at a row. Processes are forked, so that the
imports are paid for once. Under a real `accelerate launch` each process takes its part in the one SCHEME named.
"""

import os
import socket
import sys
import time
from pathlib import Path

import torch
from accelerate.utils import gather_object
from deepspeed.utils import safe_get_full_grad
from torch.distributed.tensor import DTensor
from torch.multiprocessing import start_processes
from torch.nn.parallel import DistributedDataParallel
from transformers import TrainerCallback

from grpo_vlm.config import load_and_check
from grpo_vlm.rollout.types import Completion
from grpo_vlm.rollout.weights import full, gathered, weights
from grpo_vlm.training.session import Session
from tests.tiny import tiny_model
from tests.training.hashed import hashed_reward
from tests.training.launcher import RANKS, environment
from tests.training.rigs import rows, values

DROPPED, SLEEPING = "-dropped", "-sleeping"
REFERENCE = {"algorithm.disable_kl": False, "algorithm.use_kl_loss": True, "algorithm.kl_penalty": "low_var_kl"}
LORA = {
    "worker.actor.model.lora.rank": 4,
    "worker.actor.model.lora.alpha": 8,
    "worker.actor.model.lora.exclude_modules": "",  # adapters in the vision tower too
}
CASES = {
    "whole": REFERENCE | {"algorithm.ref_model_sync_steps": 1},
    "lora": LORA | REFERENCE,
    "full kl": REFERENCE | {"algorithm.kl_penalty": "full", "algorithm.kl_coef": 0.5},
    "frozen": {"worker.actor.model.freeze_vision_tower": True},
    "bf16 states": {"worker.actor.optim.strategy": "adamw_bf16"},
    "whole until backward": {
        "worker.actor.fsdp.enable_full_shard": False,
        "worker.actor.fsdp.enable_rank0_init": False,
    },
}


class FixedEngine:
    """Answers that depend on the request's seed alone, some long and some short, so that every scheme trains on the
    same ones. What is under test begins after generation."""

    name = "fixed"

    def __init__(self, vocabulary: int, banned: list[int]):
        self.allowed = torch.tensor(sorted(set(range(vocabulary)) - set(banned)))

    def start(self) -> None:
        """See Engine."""

    close = release = start

    def sync(self, model, version):
        """See Engine."""
        return {}

    def metrics(self):
        """See Engine."""
        return {}

    def generate(self, requests, on_progress=None):
        """See Engine."""
        return [[self._answer(request, child) for child in range(request.sampling.n)] for request in requests]

    def _answer(self, request, child):
        draw = torch.Generator().manual_seed(request.seed % 2**40 + child)
        length = int(torch.randint(1, request.sampling.max_tokens + 1, (), generator=draw))
        ids = self.allowed[torch.randint(len(self.allowed), (length,), generator=draw)].tolist()
        return Completion(tuple(ids), (-7.0,) * length, "length", str(ids), 0)


class Watch(TrainerCallback):
    """Notes how weights and gradients lie, and the whole gradients, before the first update moves the weights."""

    def __init__(self, trainer):
        self.trainer, self.gradients, self.counts, self.blanks = trainer, None, {}, 0

    def on_train_begin(self, args, state, control, **kwargs):
        """DeepSpeed steps within its backward pass, before the callback below."""
        if self.trainer.is_deepspeed_enabled:
            engine = self.trainer.model_wrapped
            step = engine.step
            engine.step = lambda: (self.look(), step())

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        """See TrainerCallback."""
        if not self.trainer.is_deepspeed_enabled:
            self.look()

    def look(self):
        """The first time only."""
        if self.gradients is not None:
            return
        trained = [value for value in self.trainer.model.parameters() if value.requires_grad]
        self.counts = {
            "trained": len(trained),
            "dtensor": sum(isinstance(value, DTensor) for value in trained),
            "sharded gradients": sum(isinstance(value.grad, DTensor) for value in trained),
            "ds_id": sum("ds_id" in vars(value) for value in trained),
        }
        if self.trainer.is_deepspeed_enabled:
            self.gradients = [safe_get_full_grad(value) for value in trained]
        else:
            self.gradients = [full(value.grad) for value in trained]


def work(rank: int, folder: Path, kind: str, case: str, steps: int, name: str, port: int | None) -> None:
    """One process of one scheme. port: None where a launcher has set the environment."""
    scheme = name.removesuffix(DROPPED).removesuffix(SLEEPING)
    if port is not None:
        os.environ.update(environment(scheme, rank, port))
    torch.set_num_threads(1)
    ranks = 1 if scheme == "cpu" else RANKS
    changes = {
        "data.rollout_batch_size": 12,
        "worker.actor.global_batch_size": 4,
        "worker.actor.max_token_len_per_gpu": 70,
        "worker.actor.model.model_path": str(folder / f"tiny-{kind}"),
        "worker.actor.model.enable_gradient_checkpointing": True,
        "trainer.val_before_train": False,
        "trainer.max_steps": steps,
        "trainer.collective_timeout_s": 4.0 if name.endswith(SLEEPING) else 300.0,
        **CASES[case],
    }
    given = values(folder, folder / "runs" / name, **changes)
    known = {"needs_train_files": False, "needs_reward": False, "has_val_rows": True, "world_size": ranks}
    config, _ = load_and_check(None, (), given, **known)
    began = time.perf_counter()
    with Session(config, train_rows=rows(12), reward=hashed_reward) as session:
        trainer = session.trainer
        scorer, counts = trainer.learner.scorer, []
        trainer.engine = trainer.collector.engine = FixedEngine(
            trainer.model.config.get_text_config().vocab_size, scorer.banned_ids
        )
        trainer.add_callback(watch := Watch(trainer))
        if name.endswith(SLEEPING) and rank == ranks - 1:
            score = trainer.learner.on_row
            trainer.learner.on_row = lambda text: (score(text), "row 2" in text and time.sleep(600))
        make, lost = scorer.rows, int(name.endswith(DROPPED) and rank == ranks - 1)

        def made(*args):
            found = make(*args)
            counts.append(len(found))
            return found[: len(found) - lost]

        scorer.rows = made
        session.train()
        accelerator = trainer.accelerator
        after = {name: value.clone() for name, value in gathered(weights(trainer.model, accelerator), accelerator)}
        seen = {
            "kind": accelerator.distributed_type.name,
            "ddp": isinstance(trainer.model_wrapped, DistributedDataParallel),
            "machines": ranks // int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
            "rows": counts,
            "gradients": watch.gradients,
            "after": after,
            **watch.counts,
        }
        everyone = gather_object([seen]) if ranks > 1 else [seen]
        if rank == 0:
            torch.save({"ranks": everyone, "record": trainer.state.log_history[0]}, folder / f"{name}.pt")
            print(f"{name} ok, {time.perf_counter() - began:.1f} s", flush=True)


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def main(folder: str, kind: str, case: str, steps: str, *names: str) -> None:
    """All schemes in turn; started by a launcher, its only one."""
    if "RANK" in os.environ:
        work(int(os.environ["RANK"]), Path(folder), kind, case, int(steps), *names, None)
        return
    tiny_model(kind, folder)
    for name in names:
        arguments = (Path(folder), kind, case, int(steps), name, free_port())
        start_processes(work, arguments, nprocs=1 if name == "cpu" else RANKS, start_method="fork")


if __name__ == "__main__":
    main(*sys.argv[1:])
