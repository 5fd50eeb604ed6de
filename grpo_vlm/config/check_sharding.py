"""How the launcher divides the model over processes, and whether `worker.actor.fsdp` and `worker.actor.offload` agree
with it.

`accelerate launch` tells the processes by environment variables, which are read here, so that a contradiction is found
before a model loads. What the keys select is done in training/sharding.py.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from grpo_vlm.config.faults import Fault
from grpo_vlm.config.schema import Config
from grpo_vlm.config.values import is_bf16

FSDP = "worker.actor.fsdp."
OFFLOAD = "worker.actor.offload."
ONE, DDP, ZERO, FSDP1, FSDP2 = "one process", "DDP", "DeepSpeed ZeRO", "FSDP1", "FSDP2"


@dataclass(frozen=True)
class Launched:
    """What the launcher's file says.

    kind: ONE, DDP, ZERO, FSDP1 or FSDP2. stage: of ZeRO. weights_on_cpu, optimizer_on_cpu: kept in CPU memory all the
    time. init: ZeRO-3 divides the weights while they load.
    """

    kind: str
    stage: int = 0
    weights_on_cpu: bool = False
    optimizer_on_cpu: bool = False
    init: bool = False

    @property
    def name(self) -> str:
        """As people call it."""
        return f"{self.kind}-{self.stage}" if self.kind == ZERO else self.kind

    @property
    def whole(self) -> bool:
        """Whether a rank holds everything: weights, gradients and optimizer states."""
        return self.kind in (ONE, DDP)

    @property
    def cuts_weights(self) -> bool:
        """Whether a rank holds a part of each weight only."""
        return self.kind == FSDP2 or (self.kind == ZERO and self.stage == 3)


def launched(environment: Mapping[str, str]) -> Launched:
    """Reads the variables that `accelerate launch` sets."""
    if _is_on(environment, "ACCELERATE_USE_DEEPSPEED"):
        return _deepspeed(environment)
    if _is_on(environment, "ACCELERATE_USE_FSDP"):
        version = environment.get("FSDP_VERSION", "1")
        return Launched(FSDP2 if version == "2" else FSDP1, weights_on_cpu=_is_on(environment, "FSDP_OFFLOAD_PARAMS"))
    return Launched(DDP if int(environment.get("WORLD_SIZE", 1)) > 1 else ONE)


def _deepspeed(environment: Mapping[str, str]) -> Launched:
    file = environment.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    if file != "none":
        zero = json.loads(Path(file).read_text(encoding="utf-8")).get("zero_optimization", {})
        stage = zero.get("stage", 0)
        devices = [zero.get(f"offload_{part}", {}).get("device", "none") for part in ("param", "optimizer")]
    else:
        stage = int(environment.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", 2))
        devices = [
            environment.get(f"ACCELERATE_DEEPSPEED_OFFLOAD_{part}_DEVICE", "none") for part in ("PARAM", "OPTIMIZER")
        ]
    init = stage == 3 and _is_on(environment, "ACCELERATE_DEEPSPEED_ZERO3_INIT")
    return Launched(ZERO, stage, *(device != "none" for device in devices), init)


def _is_on(environment: Mapping[str, str], name: str) -> bool:
    return environment.get(name, "false").lower() in ("true", "1")


def sharding_faults(config: Config, environment: Mapping[str, str]) -> list[Fault]:
    """Keys that ask for what the launcher's file does not do."""
    actor, launch = config.worker.actor, launched(environment)
    fsdp, offload, faults = actor.fsdp, actor.offload, []

    def need(holds: bool, key: str, asked: str, given: str, remedy: str) -> None:
        if not holds:
            faults.append(Fault((key,), f"{key}: {asked}, but the launcher started {launch.name}, {given}; {remedy}"))

    need(
        launch.kind != FSDP1,
        "worker.actor.strategy",
        "fsdp is FSDP2 here",
        "which is not supported",
        "write fsdp_version: 2 in the launcher's file, as accelerate_configs/fsdp2.yaml does",
    )
    need(
        fsdp.enable_full_shard or not (launch.kind == ZERO and launch.stage == 3),
        FSDP + "enable_full_shard",
        "false leaves the weights whole",
        "which divides them",
        "set it to true or launch with accelerate_configs/zero2.yaml",
    )
    zero = launch.kind == ZERO
    need(
        not fsdp.enable_cpu_offload or not zero or launch.weights_on_cpu,
        FSDP + "enable_cpu_offload",
        "true keeps the weights in CPU memory",
        "whose file keeps them on the accelerator",
        "set it to false or launch with accelerate_configs/zero3_offload.yaml or fsdp2.yaml",
    )
    for key, asked in (("offload_params", offload.offload_params), ("offload_optimizer", offload.offload_optimizer)):
        need(
            not asked or not zero or launch.stage == 3,
            OFFLOAD + key,
            "true parks them in CPU memory between the phases",
            "which cannot",
            "set it to false or launch with accelerate_configs/zero3.yaml, fsdp2.yaml or multi_gpu.yaml",
        )
    world = int(environment.get("WORLD_SIZE", 1))
    if fsdp.fsdp_size not in (-1, world):
        faults.append(
            Fault(
                (FSDP + "fsdp_size",),
                f"{FSDP}fsdp_size: {fsdp.fsdp_size} devices are to share the weights, but the launcher started {world}"
                f" process(es), and all of a run share them; write -1 or {world}",
            )
        )
    strategy = actor.optim.strategy
    need(
        not zero or not is_bf16(fsdp.torch_dtype),
        FSDP + "torch_dtype",
        "bf16 is the type of the trained weights",
        "which computes in bf16 and keeps float32 masters",
        "set it to null, or launch with accelerate_configs/fsdp2.yaml",
    )
    if zero and strategy != "adamw":
        key = "worker.actor.optim.strategy"
        reason = f"{strategy} does not run, because DeepSpeed divides the optimizer's states itself"
        need(False, key, reason, "which does so", "take adamw, or launch with accelerate_configs/fsdp2.yaml")
    if launch.kind == FSDP2 and strategy == "adamw_8bit":
        key = "worker.actor.optim.strategy"
        asked = "adamw_8bit does not run, because bitsandbytes knows no divided weights"
        need(
            False,
            key,
            asked,
            "which divides them",
            "take adamw_bf16, or launch with accelerate_configs/multi_gpu.yaml",
        )
    if offload.offload_params and config.worker.rollout.name == "transformers":
        faults.append(
            Fault(
                (OFFLOAD + "offload_params",),
                f"{OFFLOAD}offload_params: true parks the weights while answers are generated, and "
                "worker.rollout.name=transformers generates with them; set it to false or take vllm",
            )
        )
    return faults


def sharding_notices(config: Config, environment: Mapping[str, str]) -> list[str]:
    """Keys that change nothing under the launcher's scheme."""
    launch, fsdp = launched(environment), config.worker.actor.fsdp
    lines = {
        f"{FSDP}enable_full_shard = false has no effect: {launch.name} divides nothing": (
            launch.whole and not fsdp.enable_full_shard
        ),
        f"{FSDP}enable_cpu_offload = true has no effect: {launch.name} keeps the weights whole on each accelerator; "
        "launch with accelerate_configs/fsdp2.yaml or zero3_offload.yaml": launch.whole and fsdp.enable_cpu_offload,
        f"{FSDP}enable_rank0_init = false has no effect: only FSDP2 reads the weights on one process and sends them "
        "out": launch.kind != FSDP2 and not fsdp.enable_rank0_init,
        f"{FSDP}mp_reduce_dtype = {fsdp.mp_reduce_dtype} has no effect: DDP sums gradients in the weights' type": (
            launch.whole and is_bf16(fsdp.mp_reduce_dtype)
        ),
    }
    return [line for line, holds in lines.items() if holds]
