"""Run by test_packed.py, starts two gloo processes: the packed form under DDP, FSDP2 and ZeRO-3, with checkpointing.

Each rank scores two rows of its own, the second rank's without a picture but for a blank one, and a row that nobody
scores. The reduced gradients are those of all rows in one process, divided by the number of ranks.
"""

import os
import sys
import tempfile
from collections.abc import Sequence

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_grad
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing import start_processes
from torch.nn.parallel import DistributedDataParallel

from grpo_vlm.model.packed import enable_packing
from grpo_vlm.model.packing import IMAGE, PackedRow, blank_group, build_row
from tests.model import cases

RANKS = 2


def rows_of(rank: int, model: nn.Module) -> list[PackedRow]:
    first, second, third, text = cases.groups(model, cases.mixed(model.config.model_type))
    blank = blank_group(cases.Draw().media(IMAGE, 1, 2, 2, "blank"), cases.IMAGE_TOKEN)
    parts = [[[first, second], [third]], [[text, blank], [blank]]][rank]
    return [build_row(part, multiple=16) for part in parts]


def loss_of(model: nn.Module, row: PackedRow) -> Tensor:
    scores = model(packed=row, temperature=cases.TEMPERATURE, banned_ids=cases.BANNED)
    return cases.weighted(*scores)


def packed_model(kind: str) -> nn.Module:
    model = cases.tiny(kind)
    enable_packing(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def through_ddp(model: nn.Module, rows: list[PackedRow]) -> dict[str, Tensor]:
    wrapped = DistributedDataParallel(model)
    with wrapped.no_sync():
        for row in rows[:-1]:
            loss_of(wrapped, row).backward()
    loss_of(wrapped, rows[-1]).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def through_fsdp2(model: nn.Module, rows: list[PackedRow]) -> dict[str, Tensor]:
    for layer in (*model.model.language_model.layers, *model.model.visual.blocks, model):
        fully_shard(layer)
    for row in rows:
        loss_of(model, row).backward()
    return {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}


def through_zero3(model: nn.Module, rows: list[PackedRow]) -> dict[str, Tensor]:
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
            "zero_allow_untested_optimizer": True,
        },
    )
    assert all(parameter.ds_numel > parameter.numel() for parameter in model.parameters())  # each rank has a part
    for row in rows:
        engine.set_gradient_accumulation_boundary(row is rows[-1])
        engine.backward(loss_of(engine, row), scale_wrt_gas=False)
    return {name: safe_get_full_grad(parameter) for name, parameter in model.named_parameters()}


def compare(rank: int, kind: str) -> None:
    """The schemes' gradients with those of all rows in one process."""
    model = packed_model(kind)
    expected = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    for number in range(RANKS):
        for row in rows_of(number, model):
            for name, gradient in cases.gradients(model, loss_of(model, row)).items():
                expected[name] += gradient / RANKS
    rows = rows_of(rank, model)
    for scheme in (through_ddp, through_fsdp2, through_zero3):
        cases.assert_same_gradients(scheme(packed_model(kind), rows), expected)
        print(f"{kind} {scheme.__name__} ok", flush=True)


def work(rank: int, kinds: Sequence[str], meeting: str) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}  # DeepSpeed reads these
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=RANKS)
    for kind in kinds:
        compare(rank, kind)
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:  # forked, so that the imports are paid for once
        start_processes(work, (sys.argv[1:], f"{folder}/meeting"), nprocs=RANKS, start_method="fork")
