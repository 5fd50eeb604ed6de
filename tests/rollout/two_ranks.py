"""One rank of a run on two, whose server is killed while rank 1 still generates and rank 0 has all of its answers. The
next server falls with its guard.

Started twice by test_faults.py: `python -m tests.rollout.two_ranks MODEL FOLDER` with the launcher's variables. The
weights are sharded (FSDP), so no rank can give them to the new server alone. Writes rank-N.json and ends with the exit
code of a lost engine, because the server falls once more than it may.
"""

import json
import sys
import time
from pathlib import Path

import psutil
import torch
from accelerate import Accelerator, PartialState
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from grpo_vlm.cli import guarded
from grpo_vlm.errors import RolloutError
from tests.rollout import steps


def main(arguments):
    path, folder = map(Path, arguments)
    torch.set_num_threads(1)
    PartialState(cpu=True, backend="gloo")
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    model = steps.load(path)
    steps.set_weights(model, path, 1)
    fully_shard(model, mesh=init_device_mesh("cpu", (accelerator.num_processes,)))
    engine = steps.make_engine(path, folder, model, accelerator=accelerator, max_restarts=1)
    note = {"warnings": []}
    engine.warn = note["warnings"].append
    try:
        engine.start()
        guard = share(folder, accelerator, engine)

        def kill_server(done):
            if rank == 0:
                (folder / "answered").touch()
            elif done == 1:
                (guard if "answers" in note else steps.api_process(guard.pid)).kill()

        engine.sync(model, 1)
        mine = steps.step_requests(engine.processor, 1)[2:] if rank else steps.step_requests(engine.processor, 1)[:1]
        while rank == 1 and not (folder / "answered").exists():  # rank 0 has its answers before the server falls
            time.sleep(0.05)
        note["answers"] = steps.plain(engine.generate(mine, kill_server))
        note["metrics"] = engine.metrics()
        guard = share(folder, accelerator, engine)
        note["refused"] = refusal(engine, mine, rank)
        note["again"] = steps.plain(engine.generate(mine))
        engine.generate(mine, kill_server)
    except RolloutError as error:
        note["end"] = str(error)
        raise
    finally:
        engine.close()
        (folder / f"rank-{rank}.json").write_text(json.dumps(note))


def share(folder, accelerator, engine):
    """The server's guard, on both ranks."""
    if engine.server is not None:
        (folder / "guard").write_text(str(engine.server.process.pid))
    accelerator.wait_for_everyone()
    return psutil.Process(int((folder / "guard").read_text()))


def refusal(engine, requests, rank):
    """What both ranks say when rank 1 has a prompt that is too long."""
    try:
        engine.generate([steps.too_long(requests[-1])] if rank else requests)
    except RolloutError as error:
        return str(error)
    return None


if __name__ == "__main__":
    sys.exit(guarded(main, sys.argv[1:]))
