"""What a run will need, before it starts: memory of each GPU by part, seconds of a rollout step by phase, and whether
the generation server fits beside the trainer. Kept as plan.json of the run folder, beside what was measured.

Formulas are model/memory.py's and model/cost.py's. Generation is decoding by rounds over all sequences that fit in the
cache; each round reads the weights and the sequences' cache and computes one token of each.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from torch import nn

from grpo_vlm.config import Config, updates_per_step
from grpo_vlm.config.check_sharding import FSDP2, Launched, launched
from grpo_vlm.data.rows import Prompt
from grpo_vlm.model.cost import Mode, ModelShape, Speed, forward_flops, forward_seconds, row_parts, train_seconds
from grpo_vlm.model.gpus import GPU
from grpo_vlm.model.load import outline_policy, vision_tower
from grpo_vlm.model.memory import BF16, DRIVER_BYTES, Counts, Part, Widths, training_parts
from grpo_vlm.model.packed import base_model, form
from grpo_vlm.model.packing import Load
from grpo_vlm.report.files import PLAN_NAME
from grpo_vlm.rollout.sync import CHUNK_BYTES
from grpo_vlm.training.scoring import row_tokens

GB = 1e9
DECODE_SHARE = 0.5  # of bandwidth and peak that decoding reaches: 7.3 s for 512 x 300 tokens of 3B on an H200
VISION_SHARE = 0.45  # of the peak, compiled; the 18 updates measured on an H200 are then met within 27 %
SYNC_GB_S = 15.0  # CUDA IPC on an H200: 8.1 GB in 0.51 to 0.56 s
ASLEEP_BYTES = 1.5e9  # of a sleeping server: its context and what its libraries hold; measured on an H200
SERVER_WORK_BYTES = 4e9  # of a server that is awake, beside weights and cache: activations of a pass, graphs
MANY_SEQUENCES, FEW_SEQUENCES, LARGE_GPU_BYTES = (
    1024,
    256,
    75e9,
)  # vLLM's default of max_num_seqs, and where it changes
WARM_STEPS = 2  # steps that compile; they do not count among the measured
MEASURED = {  # our name -> metric
    "gen": "timing_s/gen",
    "old": "timing_s/old",
    "ref": "timing_s/ref",
    "update_actor": "timing_s/update_actor",
    "sync": "timing_s/sync",
    "step": "timing_s/step",
}
PEAK = "perf/max_memory_allocated_gb"  # in GiB, since the process began


@dataclass(frozen=True)
class Typical:
    """A prompt as the rows have it: tokens, and patches (time, height, width) of its pictures and videos; and the
    tokens of an answer, which nobody knows beforehand."""

    prompt_tokens: int
    grids: tuple[tuple[int, int, int], ...]
    answer_tokens: int

    @classmethod
    def of(cls, prompts: Sequence[Prompt], config: Config, answer_tokens: int | None = None) -> "Typical":
        """The prompt of middle length. answer_tokens: default half of data.max_response_length."""
        middle = sorted(prompts, key=lambda prompt: len(prompt.token_ids))[len(prompts) // 2]
        grids = () if middle.image_grid_thw is None else middle.image_grid_thw.tolist()
        grids = [*grids, *(clip.grid.tolist() for clip in middle.videos)]
        length = answer_tokens or max(1, config.data.max_response_length // 2)
        return cls(len(middle.token_ids), tuple(tuple(grid) for grid in grids), length)

    def load(self, groups: float, answers: int) -> Load:
        """Of a row with this many groups of `answers` answers."""
        prompt, answer = self.prompt_tokens, self.answer_tokens
        pairs = prompt * (prompt + 1) / 2 + answers * (answer * prompt + answer * (answer + 1) / 2)
        scored = answers * answer
        return Load(
            round(groups * (prompt + scored)),
            round(groups * pairs),
            round(groups * scored),
            self.grids * max(1, round(groups)),
        )


@dataclass(frozen=True)
class Forecast:
    """GB are 1e9 bytes. update_gb, generation_gb: by part, of one training GPU; the largest row is counted full.
    seconds: of a rollout step by phase, communication between GPUs left out; None: not predicted. remarks: what will
    not fit, with the remedy."""

    gpu: str
    gpu_gb: float | None
    processes: int
    scheme: str
    typical: Typical
    update_gb: dict[str, float]
    generation_gb: dict[str, float]
    seconds: dict[str, float | None]
    cache_tokens: int | None
    remarks: tuple[str, ...]

    @property
    def peak_gb(self) -> float:
        """Of tensors in the update: what torch's max_memory_allocated shows."""
        return sum(self.update_gb.values())


def count_parameters(model: nn.Module) -> Counts:
    """Of a policy, with weights or without."""
    base, sizes = base_model(model), {}
    adapted = base is not model
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    everything = sum(parameter.numel() for parameter in model.parameters())
    for name, parameter in model.named_parameters():
        layer = next((part for part in _prefixes(name) if part.rpartition(".")[2].isdigit()), "")
        sizes[layer] = sizes.get(layer, 0) + parameter.numel()
    outside = sizes.pop("", 0)
    adapters = trained if adapted else 0
    return Counts(everything - adapters, trained, adapters, max(sizes.values(), default=0), outside)


def _prefixes(name: str) -> list[str]:
    """a.b.3.c: a, a.b, a.b.3, a.b.3.c"""
    parts = name.split(".")
    return [".".join(parts[: end + 1]) for end in range(len(parts))]


def forecast(
    config: Config,
    prompts: Sequence[Prompt],
    gpu: GPU,
    *,
    launch: Launched | None = None,
    processes: int | None = None,
    answer_tokens: int | None = None,
) -> Forecast:
    """For a checked configuration. prompts: a few of its rows. launch, processes: what the launcher says, by default
    the one of this process. Reads config.json of the model and no weights."""
    launch = launched(os.environ) if launch is None else launch
    processes = int(os.environ.get("WORLD_SIZE", 1)) if processes is None else processes
    return _Planner(config, Typical.of(prompts, config, answer_tokens), gpu, launch, processes).forecast()


class _Planner:
    def __init__(self, config: Config, typical: Typical, gpu: GPU, launch: Launched, processes: int):
        self.config, self.typical, self.gpu, self.launch, self.processes = config, typical, gpu, launch, processes
        model, actor = outline_policy(config), config.worker.actor
        self.counts, self.hf = count_parameters(model), base_model(model).config
        self.shape = ModelShape.of(self.hf) if actor.padding_free and form(self.hf)[0] == "packed" else None
        frozen = not any(parameter.requires_grad for parameter in vision_tower(model).parameters())
        self.mode = Mode(
            "forward" if frozen else "train", self.counts.adapters > 0, actor.model.enable_gradient_checkpointing
        )
        self.adapted = self.counts.adapters > 0
        self.widths = Widths.of(config, launch, accelerator=not gpu.is_cpu, adapters=self.adapted)
        self.reference = not config.algorithm.disable_kl and not self.adapted
        shares = {"attention": 0.5, "vision": 0.75, "row_s": 0.01} if gpu.is_cpu else {"vision": VISION_SHARE}
        self.speed = Speed(gpu.peak_tflops, **shares)
        self.shared = (
            not gpu.is_cpu and config.worker.rollout.name == "vllm" and (config.worker.rollout.placement == "shared")
        )

    def forecast(self) -> Forecast:
        update, generation = self._memory()
        seconds = self._seconds()
        known = [value for value in seconds.values() if value is not None]
        seconds["step"] = sum(known) if seconds["gen"] is not None and seconds["update_actor"] is not None else None
        plan = Forecast(
            gpu=self.gpu.name,
            gpu_gb=None if self.gpu.memory is None else self.gpu.memory / GB,
            processes=self.processes,
            scheme=self.launch.name,
            typical=self.typical,
            update_gb=update,
            generation_gb=generation,
            seconds=seconds,
            cache_tokens=self._cache_tokens(),
            remarks=(),
        )
        return replace(plan, remarks=tuple(self._remarks(plan)))

    # ---- memory

    def _memory(self) -> tuple[dict[str, float], dict[str, float]]:
        actor, launch = self.config.worker.actor, self.launch
        parts = training_parts(
            self.counts,
            self.widths,
            launch,
            self.processes,
            reference=self.reference,
            checkpointing=self.mode.checkpointing,
            keeps_gathered=launch.kind == FSDP2 and not actor.fsdp.enable_full_shard,
            offload=(actor.offload.offload_params, actor.offload.offload_optimizer),
        )
        parts += self._row_parts()
        if not self.gpu.is_cpu:
            parts += [Part("weights on their way to the server", CHUNK_BYTES, "generation")]
        of = {
            phase: {part.name: part.bytes / GB for part in parts if part.at in ("always", phase) and part.bytes}
            for phase in ("update", "generation")
        }
        return of["update"], of["generation"]

    def _row_parts(self) -> list[Part]:
        """Of a row that is full: activations, and the head's chunk."""
        if self.shape is None:
            return []
        budget, n = row_tokens(self.config), self.config.worker.rollout.n
        group = self.typical.load(1, n).tokens
        mine = self.config.worker.actor.global_batch_size / self.processes
        groups = min(budget / group, mine)
        load = self.typical.load(groups, n)
        if groups < 1:  # a group that is cut repeats its prompt, and its pictures, in every row
            load = replace(load, tokens=budget, scored=max(1, budget - self.typical.prompt_tokens))
        fused = self.config.worker.actor.use_torch_compile and self.launch.whole
        width = self.widths.computed if not self.gpu.is_cpu else 4
        parts = row_parts(self.shape, load, self.mode, fused=fused and not self.gpu.is_cpu, width=max(width, BF16))
        return [
            Part("activations of the largest row", parts.activations, "update"),
            Part("the head's chunk", parts.head, "update"),
        ]

    # ---- server

    @property
    def _tensor(self) -> int:
        return self.config.worker.rollout.tensor_parallel_size or 1

    def _server_bytes(self) -> float:
        """What the server takes of each of its GPUs."""
        return self.config.worker.rollout.gpu_memory_utilization * self.gpu.memory

    def _cache_bytes(self) -> float:
        return self._server_bytes() - self.counts.total * BF16 / self._tensor - SERVER_WORK_BYTES

    def _token_bytes(self) -> float:
        """Of one token in the cache."""
        return 2 * self.shape.text.layers * self.shape.text.key_width * BF16 / self._tensor

    def _cache_tokens(self) -> int | None:
        if self.shape is None or self.gpu.is_cpu or self.config.worker.rollout.name != "vllm":
            return None
        return max(0, int(self._cache_bytes() / self._token_bytes()))

    # ---- seconds

    def _seconds(self) -> dict[str, float | None]:
        config, shape = self.config, self.shape
        if shape is None:
            return dict.fromkeys(("gen", "update_actor", "sync"))
        updates, n = updates_per_step(config), config.worker.rollout.n
        prompts = config.data.rollout_batch_size / self.processes
        group = self.typical.load(1, n)
        rows = max(1.0, prompts * group.tokens / row_tokens(config))
        load = self.typical.load(prompts / rows, n)
        passes = updates * config.worker.actor.global_batch_size / config.data.rollout_batch_size
        forward = rows * forward_seconds(shape, load, self.speed)
        found: dict[str, float | None] = {"gen": self._generation(prompts)}
        if updates > 1:
            found["old"] = forward
        if not config.algorithm.disable_kl:
            found["ref"] = forward
        found["update_actor"] = passes * rows * train_seconds(shape, load, self.speed, self.mode)
        found["update_actor"] += updates * self._optimizer()
        sent = self.counts.adapters if config.worker.rollout.lora_sync == "adapter" else self.counts.total
        found["sync"] = None if self.gpu.is_cpu else (sent * BF16 / GB) / SYNC_GB_S
        return found

    def _optimizer(self) -> float:
        """Reads and writes weights and states, reads gradients."""
        share = 1 if self.launch.whole else self.processes
        moved = self.counts.trained * (2 * self.widths.weight + self.widths.gradient + 2 * self.widths.states) / share
        return moved / (self.gpu.bandwidth_tb_s * 1e12)

    def _generation(self, prompts: float) -> float | None:
        """By an engine that this GPU has its share in; None where the server is another machine's or the trained
        model itself generates."""
        rollout, shape, typical = self.config.worker.rollout, self.shape, self.typical
        if rollout.name != "vllm" or rollout.placement != "shared" or self.gpu.is_cpu:
            return None
        tensor, prompts = self._tensor, prompts * self._tensor
        sequences = prompts * rollout.n
        held = self._cache_tokens() / (typical.prompt_tokens / rollout.n + typical.answer_tokens)
        default = MANY_SEQUENCES if self.gpu.memory > LARGE_GPU_BYTES else FEW_SEQUENCES
        together = max(1.0, min(sequences, held, rollout.engine_kwargs.get("max_num_seqs") or default))
        depth = typical.prompt_tokens + typical.answer_tokens / 2
        read = self.counts.total * BF16 / tensor + together * depth * self._token_bytes()
        computed = 2 * together * (shape.text.parameters + shape.head_parameters) / tensor
        round_s = read / (self.gpu.bandwidth_tb_s * 1e12) + computed / (self.gpu.peak_tflops * 1e12)
        decoding = typical.answer_tokens * sequences / together * round_s / DECODE_SHARE
        prefill = self.speed.seconds(forward_flops(shape, replace(typical.load(1, 0), scored=0))) * prompts / tensor
        return prefill + decoding

    # ---- does it fit

    def _remarks(self, plan: Forecast) -> list[str]:
        if self.gpu.is_cpu:
            return []
        rollout, total, found = self.config.worker.rollout, self.gpu.memory / GB, []
        own = DRIVER_BYTES / GB
        needed = plan.peak_gb + own + (ASLEEP_BYTES / GB if self.shared else 0)
        if needed > total:
            found.append(f"the update does not fit: {needed:.1f} GB of {total:.1f} GB. {self._smaller()}")
        beside = sum(plan.generation_gb.values()) + own
        server = rollout.gpu_memory_utilization * total
        if self.shared and beside + server > total:
            share = max(0.0, (total - beside) / total)
            found.append(
                f"the server does not fit beside the trainer while it is awake: {beside:.1f} GB + "
                f"{server:.1f} GB (worker.rollout.gpu_memory_utilization={rollout.gpu_memory_utilization:g}) of "
                f"{total:.1f} GB. Set it to {int(share * 100) / 100:g} or less, or park the trainer meanwhile: "
                "worker.actor.offload.offload_optimizer=true (and offload_params=true)"
            )
        longest = rollout.max_model_len or self.config.data.max_prompt_length + self.config.data.max_response_length
        if rollout.name == "vllm" and plan.cache_tokens is not None and plan.cache_tokens < longest:
            found.append(
                f"the server has room for {plan.cache_tokens} tokens in its cache and one answer may take {longest}: "
                "raise worker.rollout.gpu_memory_utilization or worker.rollout.tensor_parallel_size"
            )
        return found

    def _smaller(self) -> str:
        actor, ways = self.config.worker.actor, []
        if not actor.model.enable_gradient_checkpointing:
            ways.append("worker.actor.model.enable_gradient_checkpointing=true")
        ways.append(f"a lower worker.actor.max_token_len_per_gpu than {row_tokens(self.config)}")
        if actor.fsdp.torch_dtype is None and self.launch.whole:
            ways.append("worker.actor.fsdp.torch_dtype=bf16")
        if not self.launch.cuts_weights:
            ways.append("more GPUs with accelerate_configs/zero3.yaml or fsdp2.yaml")
        if not self.adapted:
            ways.append("LoRA (worker.actor.model.lora.rank=64)")
        return "Ways out: " + "; ".join(ways)


# ---- plan.json


def write_plan(folder: Path, plan: Forecast) -> None:
    """Into the run folder."""
    _write(folder, {"predicted": asdict(plan) | {"peak_gb": plan.peak_gb}, "measured": {}})


def add_measured(folder: Path) -> str:
    """Puts what was measured beside the plan; returns both in a line, empty where a file is not there."""
    plan_path, metrics_path = folder / PLAN_NAME, folder / "metrics.jsonl"
    if not plan_path.is_file() or not metrics_path.is_file():
        return ""
    plan = json.loads(plan_path.read_text(encoding="utf-8"))
    steps = [json.loads(line) for line in metrics_path.read_text(encoding="utf-8").splitlines()]
    steps = [step for step in steps if "timing_s/update_actor" in step]
    timed = steps[WARM_STEPS:] or steps
    measured: dict[str, Any] = {
        name: median(step[metric] for step in timed if metric in step)
        for name, metric in MEASURED.items()
        if any(metric in step for step in timed)
    }
    plan["measured"] = {"seconds": measured, "steps": len(timed)}
    peaks = [step[PEAK] * 2**30 / GB for step in steps if PEAK in step]
    if peaks:
        plan["measured"]["peak_gb"] = max(peaks)
    _write(folder, plan)
    return _compared(plan)


def _compared(plan: dict[str, Any]) -> str:
    predicted, measured = plan["predicted"], plan["measured"]
    pairs = [(name, predicted["seconds"].get(name), value, "s") for name, value in measured["seconds"].items()]
    if "peak_gb" in measured:
        pairs.append(("memory", predicted["peak_gb"], measured["peak_gb"], "GB"))
    shown = [f"{name} {want:.1f} / {got:.1f} {unit}" for name, want, got, unit in pairs if want is not None]
    return f"planned / measured: {', '.join(shown)}" if shown else ""


def _write(folder: Path, content: dict[str, Any]) -> None:
    (folder / PLAN_NAME).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
