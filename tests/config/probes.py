"""For each option that works: a value other than the default, and where its effect is seen.

An observer takes a checked configuration and returns something comparable; the test sees that it differs with and
without the option. `run` trains a tiny model for two steps; the others look at what one part of the program makes of
the configuration. A row for a new option is one line in the right table.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, AutoProcessor

from grpo_vlm import Run
from grpo_vlm.config import Config, run_folder, sampling_values
from grpo_vlm.data.dataset import PromptDataset
from grpo_vlm.data.video import VideoRule
from grpo_vlm.errors import GRPOVLMError
from grpo_vlm.model.load import master_dtype
from grpo_vlm.rollout.command import server_command, server_settings
from grpo_vlm.rollout.engine import make_engine
from grpo_vlm.rollout.probe import SyncProbe
from grpo_vlm.rollout.vllm_engine import VLLMEngine
from grpo_vlm.training.arguments import computes_in_bf16, learning_rate_factor, training_arguments
from grpo_vlm.training.session import Session
from tests.tiny import tiny_model

Observer = Callable[[Config], Any]
UNSTEADY = ("timing", "perf/", "reward/slowest_s")  # metrics of the clock and the machine
REWARD = '''"""Scores that depend on the text, the answer and the arguments."""
import hashlib


def part(text):
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=2).digest(), "big") / 65535


def score(reward_inputs, weight=1.0):
    found = []
    for item in reward_inputs:
        text = item["response"] + item["ground_truth"]
        accuracy = float(part(text + "a") > 0.5)
        found.append({"overall": weight * part(text), "accuracy": accuracy, "format": part("f" + text)})
    return found


def other(reward_inputs):
    return [{"overall": part(item["response"][::-1]), "accuracy": 0.0, "format": 0.0} for item in reward_inputs]

'''


def make_files(folder: Path) -> None:
    """Rows, pictures in two folders, templates and a reward file, for every observer."""
    for name, side in (("pictures", 56), ("others", 84)):
        (folder / name).mkdir()
        for number in range(4):
            Image.new("RGB", (side, side), (60 * number, side, 90)).save(folder / name / f"{number}.png")
    (folder / "pictures/bad.png").write_bytes(b"no picture")
    rows = [
        {
            "problem": f"<image>Question {number}?",
            "prompt": f"<image>Another one, {number}, and longer?",
            "answer": str(number),
            "solution": f"as {number}",
            "blank": "",
            "images": [f"{number % 4}.png"],
            "wide": ["0.png"],
            "broken": ["bad.png" if number == 1 else "0.png"],
            "links": ["http://127.0.0.1:9/0.png"],
            "shown": "<video>What happens?",
            "nothing": None,
            "clips": [{"video": [f"{frame}.png" for frame in range(4)]}],
        }
        for number in range(12)
    ]
    for name, part in (("rows", rows[:8]), ("fewer", rows[:4]), ("val", rows[8:])):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, part)))
    (folder / "wrap.jinja").write_text("{{ content }} Think first.")
    (folder / "chat.jinja").write_text(
        "{% for message in messages %}{% for part in message['content'] %}{{ part['text'] if part['type'] == 'text' "
        "else '<|vision_start|><|image_pad|><|vision_end|>' }}{% endfor %}{% endfor %} Go:"
    )
    (folder / "reward.py").write_text(REWARD)


def base(folder: Path) -> dict[str, Any]:
    """The settings that every observation starts from: 4 prompts x 4 answers, two updates a step."""
    return {
        "data.train_files": str(folder / "rows.jsonl"),
        "data.prompt_key": "problem",
        "data.image_dir": str(folder / "pictures"),
        "data.min_pixels": 3136,
        "data.max_pixels": 50176,
        "data.max_prompt_length": 256,
        "data.max_response_length": 8,
        "data.rollout_batch_size": 4,
        "worker.actor.global_batch_size": 2,
        "worker.actor.model.model_path": str(tiny_model("qwen2_5_vl", folder)),
        "worker.actor.model.enable_gradient_checkpointing": False,
        "worker.actor.optim.lr": 1e-2,
        "worker.rollout.name": "transformers",
        "worker.rollout.n": 4,
        "worker.reward.reward_function": f"{folder / 'reward.py'}:score",
        "algorithm.disable_kl": True,
        "trainer.max_steps": 1,
        "trainer.val_before_train": False,
        "trainer.logger": ["file"],
    }


# ---- observers


def run(config: Config) -> Any:
    """Metrics, samples, files and final weights of a run; or its error."""
    folder = run_folder(config)
    try:
        Run(config).train()
    except GRPOVLMError as error:
        return f"{type(error).__name__}: {error}".replace(str(folder), "RUN")
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    kept = [{k: v for k, v in record.items() if not k.startswith(UNSTEADY)} for record in metrics]
    samples = (folder / "samples.jsonl").read_text()
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
    weights = {}
    for path in sorted(folder.glob("global_step_*/model/*.safetensors")):
        weights |= {f"{path.parts[-3]} {k}": v.double().sum().item() for k, v in load_file(path).items()}
    return (
        kept,
        samples,
        [name for name in files if "tfevents" not in name],
        weights,
        any("tfevents" in f for f in files),
    )


def dataset(config: Config) -> Any:
    """The prompts that the training rows become; or what is wrong with them."""
    try:
        processor = AutoProcessor.from_pretrained(config.worker.actor.model.model_path)
        if config.data.override_chat_template:
            processor.chat_template = Path(config.data.override_chat_template).read_text()
        rows = PromptDataset(config.data.train_files, config.data, processor)
        report = rows.validate()
        prompts = rows.prompts(range(len(rows)))
    except GRPOVLMError as error:
        return str(error)
    seen = [(p.text, tuple(p.token_ids), p.ground_truth, [i.size for i in p.images], p.image_keys) for p in prompts]
    return report.kept, seen, rows.workers


def video(config: Config) -> Any:
    """How many frames of which size are shown of a long video and of a short one."""
    processor = AutoProcessor.from_pretrained(config.worker.actor.model.model_path)
    rule = VideoRule.of(processor.video_processor, config.data)
    sizes = rule.target(8, 640, 480), rule.target(64, 1920, 1080), rule.target(8, 60, 60)
    return rule.fps, rule.min_frames, rule.max_frames, sizes


def server(config: Config) -> Any:
    """The command line of the vLLM server on eight GPUs, and what decides where it listens."""
    settings = server_settings(config, "cuda", 8)
    return server_command(settings, settings.port or 8000), asdict(settings)


def cpu_server(config: Config) -> Any:
    return asdict(server_settings(config, "cpu"))


def engine(config: Config) -> Any:
    """What watches the vLLM server, and when and how closely its weights are checked. No server is started."""
    path = config.worker.actor.model.model_path
    made = VLLMEngine(
        config,
        processor=AutoProcessor.from_pretrained(path),
        model=AutoModelForImageTextToText.from_pretrained(path, dtype="float32"),
        accelerator=Accelerator(cpu=True),
        run_dir=run_folder(config),
    )
    probe = SyncProbe(config, made, made.accelerator)
    probe.checked = True  # as after the first sync of a process
    due = [step for step in range(1, 120) if probe.due(step)]
    return made.request_timeout_s, made.step_timeout_s, made.max_restarts, due, probe.tolerance


def arguments(config: Config) -> Any:
    return training_arguments(config, Path("x"), 10, 1).to_dict() | {"logging_dir": ""}


def rates(config: Config) -> Any:
    return [learning_rate_factor(config, step, 10) for step in range(10)]


def sampling(config: Config) -> Any:
    return sampling_values(config, validation=False), sampling_values(config, validation=True)


def folder_name(config: Config) -> Any:
    return run_folder(config)


def validation_rounds(config: Config) -> int:
    """Calls of the engine in one validation."""
    calls = []
    with Session(config) as parts:
        generate = parts.trainer.engine.generate

        def counted(*args: Any) -> Any:
            calls.append(args)
            return generate(*args)

        parts.trainer.engine.generate = counted
        parts.trainer._validate(0)
    return len(calls)


def built(config: Config) -> Any:
    """Session, not started: the model's type and what is trained, how it is scored, the reward's workers."""
    with Session(config) as session:
        trainer = session.trainer
        trained = [name for name, value in trainer.model.named_parameters() if value.requires_grad]
        dtypes = {str(value.dtype) for value in trainer.model.parameters()}
        return trained, dtypes, trainer.learner.scorer.fused, session.reward.limits


def engine_kind(config: Config) -> Any:
    """Which engine a run would ask for its answers."""
    path = config.worker.actor.model.model_path
    made = make_engine(
        config,
        processor=AutoProcessor.from_pretrained(path),
        model=AutoModelForImageTextToText.from_pretrained(path, dtype="float32"),
        accelerator=Accelerator(cpu=True),
        run_dir=run_folder(config),
    )
    return type(made)


def precision(config: Config) -> Any:
    return computes_in_bf16(config), master_dtype(config)


def shown(config: Config) -> Any:
    """The sample answers at the end of a run."""
    with Session(config) as session:
        session.train()
        return session._last_samples()


def again(config: Config) -> Any:
    """What becomes of a second run in the same folder."""
    Run(config).train()
    try:
        return Run(config).train().steps
    except GRPOVLMError as error:
        return str(error)


# ---- the table


@dataclass(frozen=True)
class Probe:
    """value: other than the default; observe: where it is seen; given: settings without which it has no effect."""

    value: Any
    observe: Observer | None = run
    given: dict[str, Any] = field(default_factory=dict)
    refused: str = ""
    """In place of an effect: a part of the message with which the value is refused."""


def section(prefix: str, **probes: Any) -> dict[str, Probe]:
    return {f"{prefix}.{name}": probe for name, probe in probes.items()}


VLLM = {"worker.rollout.name": "vllm"}
KL = {"algorithm.disable_kl": False, "algorithm.kl_coef": 0.1, "trainer.max_steps": 2}
FILTER = {"algorithm.online_filtering": True, "data.mini_rollout_batch_size": 2, "trainer.max_try_make_batch": 50}
IS = {"algorithm.rollout_is": "token"}
LORA = {"worker.actor.model.lora.rank": 2}


@cache
def probes(folder: Path) -> dict[str, Probe]:
    """All rows; paths lie in `folder`."""
    qwen3, val = str(tiny_model("qwen3_vl", folder)), str(folder / "val.jsonl")
    val_before = {"data.val_files": val, "trainer.val_before_train": True}
    several: dict[str, Any] = {"worker.reward.reward_function": None}
    both = [f"{folder / 'reward.py'}:score", f"{folder / 'reward.py'}:other"]
    return (
        section(
            "data",
            train_files=Probe(str(folder / "fewer.jsonl"), dataset),
            val_files=Probe(str(folder / "fewer.jsonl"), given=val_before),
            prompt_key=Probe("prompt", dataset),
            answer_key=Probe("solution", dataset),
            allow_empty_answer=Probe(True, dataset, {"data.answer_key": "blank"}),
            image_key=Probe("wide", dataset),
            video_key=Probe("clips", dataset, {"data.prompt_key": "shown", "data.image_key": "nothing"}),
            image_dir=Probe(str(folder / "others"), dataset),
            allow_remote_media=Probe(True, dataset, {"data.image_key": "links"}),
            on_bad_media=Probe("skip", dataset, {"data.image_key": "broken"}),
            video_fps=Probe(1.0, video),
            video_min_frames=Probe(8, video),
            video_max_frames=Probe(16, video),
            video_min_pixels=Probe(20000, video),
            video_max_pixels=Probe(20000, video),
            video_total_pixels=Probe(300000, video),
            max_prompt_length=Probe(20, dataset),
            max_response_length=Probe(4),
            rollout_batch_size=Probe(2),
            mini_rollout_batch_size=Probe(1, given=FILTER | {"algorithm.filter_key": "accuracy"}),
            val_batch_size=Probe(2, validation_rounds, val_before),
            format_prompt=Probe(str(folder / "wrap.jinja"), dataset),
            override_chat_template=Probe(str(folder / "chat.jinja"), dataset),
            system_prompt=Probe("Be brief.", dataset),
            shuffle=Probe(False),
            seed=Probe(2),
            min_pixels=Probe(12544, dataset),
            max_pixels=Probe(3136, dataset, {"data.image_dir": str(folder / "others")}),
            filter_overlong_prompts=Probe(False, dataset, {"data.max_prompt_length": 20}),
            filter_overlong_prompts_workers=Probe(1, dataset),
        )
        | section(
            "worker.actor",
            global_batch_size=Probe(4),
            micro_batch_size_per_device_for_update=Probe(1, given={"worker.actor.dynamic_batching": False}),
            max_token_len_per_gpu=Probe(70),
            max_grad_norm=Probe(1e-3),
            clip_ratio_low=Probe(0.01),
            clip_ratio_high=Probe(0.01),
            clip_ratio_dual=Probe(1.01),
            loss_avg_mode=Probe("seq-mean-token-sum"),
            penalty_avg_mode=Probe("seq-mean-token-sum", given={"worker.actor.entropy_coeff": 0.1}),
            loss_type=Probe("cispo"),
            tau_positive=Probe(0.3, given={"worker.actor.loss_type": "sapo"}),
            tau_negative=Probe(3.0, given={"worker.actor.loss_type": "sapo"}),
            clip_cov_ratio=Probe(0.5, given={"worker.actor.loss_type": "clip_cov", "worker.actor.clip_cov_lb": -5.0}),
            clip_cov_lb=Probe(-5.0, given={"worker.actor.loss_type": "clip_cov", "worker.actor.clip_cov_ratio": 0.5}),
            clip_cov_ub=Probe(
                0.0,
                given={
                    "worker.actor.loss_type": "clip_cov",
                    "worker.actor.clip_cov_ratio": 0.9,
                    "worker.actor.clip_cov_lb": -5.0,
                },
            ),
            kl_cov_ratio=Probe(0.5, given={"worker.actor.loss_type": "kl_cov"}),
            kl_cov_coef=Probe(3.0, given={"worker.actor.loss_type": "kl_cov", "worker.actor.kl_cov_ratio": 0.5}),
            vespo_k_positive=Probe(1.0, given={"worker.actor.loss_type": "vespo"}),
            vespo_lambda_positive=Probe(1.0, given={"worker.actor.loss_type": "vespo"}),
            vespo_k_negative=Probe(1.0, given={"worker.actor.loss_type": "vespo"}),
            vespo_lambda_negative=Probe(1.0, given={"worker.actor.loss_type": "vespo"}),
            entropy_coeff=Probe(0.1),
            ppo_epochs=Probe(2),
            padding_free=Probe(False),
            dynamic_batching=Probe(False, given={"worker.actor.micro_batch_size_per_device_for_update": 2}),
            use_torch_compile=Probe(False, built),
        )
        | section(
            "worker.actor.model",
            model_path=Probe(qwen3),
            tokenizer_path=Probe(str(folder / "nowhere"), refused="worker.actor.model.tokenizer_path: there is no"),
            enable_gradient_checkpointing=Probe(True, arguments),
            trust_remote_code=Probe(False, arguments),
            freeze_vision_tower=Probe(True, built),
            freeze_merger=Probe(True, built),
            override_config=Probe({"text_config": {"rms_norm_eps": 0.5}}),
        )
        | section(
            "worker.actor.model.lora",
            rank=Probe(2),
            alpha=Probe(1, given=LORA),
            target_modules=Probe("q_proj,v_proj", built, given=LORA),
            exclude_modules=Probe(".*v_proj.*", built, given=LORA),
        )
        | section(
            "worker.actor.optim",
            lr=Probe(1e-3),
            betas=Probe([0.5, 0.6]),
            weight_decay=Probe(0.9),
            strategy=Probe("adamw_bf16"),
            lr_warmup_ratio=Probe(0.5, rates),
            lr_warmup_steps=Probe(3, rates, {"trainer.max_steps": 10}),
            min_lr_ratio=Probe(0.5, rates, {"worker.actor.optim.lr_scheduler_type": "cosine"}),
            lr_scheduler_type=Probe("cosine", rates),
        )
        | section("worker.actor.fsdp", torch_dtype=Probe("bf16", built), mp_param_dtype=Probe("fp32", precision))
        | section(
            "worker.rollout",
            name=Probe("vllm", engine_kind),
            n=Probe(2),
            temperature=Probe(0.5),
            top_p=Probe(0.5),
            top_k=Probe(2),
            min_p=Probe(0.5),
            repetition_penalty=Probe(2.0),
            stop=Probe(["a"]),
            seed=Probe(2),
            ignore_eos=Probe(True),
            limit_images=Probe(3, server, VLLM),
            dtype=Probe("fp16", server, VLLM),
            gpu_memory_utilization=Probe(0.4, server, VLLM),
            enforce_eager=Probe(True, server, VLLM),
            enable_chunked_prefill=Probe(True, server, VLLM),
            placement=Probe("dedicated", server, VLLM | {"worker.rollout.gpus": [1, 2]}),
            gpus=Probe([1, 2], server, VLLM | {"worker.rollout.placement": "dedicated", "worker.rollout.gpus": [3]}),
            tensor_parallel_size=Probe(2, server, VLLM),
            data_parallel_size=Probe(2, server, VLLM),
            max_model_len=Probe(400, server, VLLM),
            max_num_batched_tokens=Probe(4096, server, VLLM),
            disable_log_stats=Probe(False, server, VLLM),
            val_override_config=Probe({"n": 2}, given=val_before),
            port=Probe(23456, server, VLLM),
            start_timeout_s=Probe(5.0, server, VLLM),
            request_timeout_s=Probe(5.0, engine, VLLM),
            step_timeout_s=Probe(5.0, engine, VLLM),
            max_restarts=Probe(0, engine, VLLM),
            cpu_kv_cache_gb=Probe(2.0, cpu_server, VLLM),
            engine_kwargs=Probe({"max_num_seqs": 7}, server, VLLM),
            sync_check_every=Probe(7, engine, VLLM),
            sync_check_tolerance=Probe(0.5, engine, VLLM),
        )
        | section(
            "worker.reward",
            reward_function=Probe(f"{folder / 'reward.py'}:other"),
            reward_function_kwargs=Probe({"weight": 0.5}),
            reward_functions=Probe(both[1:], given=several | {"worker.reward.reward_functions": both[:1]}),
            reward_weights=Probe([1.0, 3.0], given=several | {"worker.reward.reward_functions": both}),
            num_workers=Probe(2, built),
            timeout_s=Probe(0.5, built),
            memory_limit_gb=Probe(2.0, built),
            max_concurrency=Probe(2, built),
            on_error=Probe("zero", built),
        )
        | section(
            "algorithm",
            gamma=Probe(0.5, given={"algorithm.adv_estimator": "reinforce_plus_plus"}),
            adv_estimator=Probe("rloo"),
            norm_adv_by_std_in_grpo=Probe(False),
            gdpo_reward_keys=Probe(["accuracy"], given={"algorithm.adv_estimator": "gdpo"}),
            gdpo_reward_weights=Probe(
                [1.0, 3.0],
                given={"algorithm.adv_estimator": "gdpo", "algorithm.gdpo_reward_keys": ["accuracy", "format"]},
            ),
            disable_kl=Probe(False),
            use_kl_loss=Probe(True, given=KL),
            kl_penalty=Probe("low_var_kl", given=KL),
            kl_coef=Probe(0.5, given=KL),
            kl_type=Probe("adaptive", given=KL | {"algorithm.kl_horizon": 100.0}),
            kl_horizon=Probe(50.0, given=KL | {"algorithm.kl_type": "adaptive"}),
            kl_target=Probe(
                1e6,
                given=KL | {"algorithm.kl_type": "adaptive", "algorithm.kl_horizon": 100.0, "trainer.max_steps": 3},
            ),
            ref_model_sync_steps=Probe(1, given=KL),
            online_filtering=Probe(True, given={"algorithm.filter_low": 0.5, "trainer.max_try_make_batch": 50}),
            filter_key=Probe("accuracy", given=FILTER),
            filter_low=Probe(0.5, given=FILTER),
            filter_high=Probe(0.5, given=FILTER),
            filter_zero_variance=Probe(
                True, given=FILTER | {"algorithm.filter_key": "accuracy", "algorithm.filter_high": 9.0}
            ),
            mask_truncated_completions=Probe(True),
            overlong_filtering=Probe(True),
            rollout_is=Probe("token"),
            rollout_is_mode=Probe("mask", given=IS | {"algorithm.rollout_is_threshold": 1.0}),
            rollout_is_threshold=Probe(0.5, given=IS),
            rollout_is_threshold_low=Probe(1.0, given=IS | {"algorithm.rollout_is_mode": "mask"}),
        )
        | section(
            "trainer",
            total_epochs=Probe(
                2,
                given={
                    "trainer.max_steps": None,
                    "trainer.total_epochs": 1,
                    "data.train_files": str(folder / "fewer.jsonl"),
                },
            ),
            max_steps=Probe(2),
            project_name=Probe("other", folder_name),
            experiment_name=Probe("other", folder_name),
            logger=Probe(["tensorboard"]),
            nnodes=Probe(3, refused="trainer.nnodes: the configuration says 3, but the launcher started 1"),
            n_gpus_per_node=Probe(3, refused="trainer.n_gpus_per_node: the configuration says 3"),
            max_try_make_batch=Probe(1, given={"algorithm.online_filtering": True, "algorithm.filter_low": 0.9}),
            val_freq=Probe(1, given=val_before | {"trainer.max_steps": 2}),
            val_before_train=Probe(True, given={"data.val_files": val}),
            val_only=Probe(True, given=val_before),
            val_generations_to_log=Probe(2, shown),
            save_freq=Probe(1, given={"trainer.max_steps": 2}),
            save_limit=Probe(1, given={"trainer.save_freq": 1, "trainer.max_steps": 3}),
            save_model_only=Probe(True),
            find_last_checkpoint=Probe(False, again),
            save_checkpoint_path=Probe(str(folder / "elsewhere"), folder_name),
            load_checkpoint_path=Probe(
                str(folder / "global_step_9"), refused="trainer.load_checkpoint_path: there is no"
            ),
        )
    )


# Options whose effect another test sees, because it needs what these runs have not: key -> file of that test, which
# names the option.
SEEN_IN = {
    "worker.actor.fsdp.enable_full_shard": "tests/config/test_config_check_sharding.py",
    "worker.actor.fsdp.enable_cpu_offload": "tests/config/test_config_check_sharding.py",
    "worker.actor.fsdp.enable_rank0_init": "tests/config/test_config_check_sharding.py",
    "worker.actor.fsdp.fsdp_size": "tests/config/test_config_check_sharding.py",
    "worker.actor.fsdp.mp_reduce_dtype": "tests/config/test_config_check_sharding.py",
    "worker.actor.offload.offload_params": "tests/config/test_config_check_sharding.py",
    "worker.actor.offload.offload_optimizer": "tests/config/test_config_check_sharding.py",
    "trainer.collective_timeout_s": "tests/training/test_sharding.py",
    "trainer.save_merged": "tests/training/test_checkpoint.py",
    "trainer.save_in_background": "tests/training/test_checkpoint.py",
    "data.num_workers": "tests/data/test_workers.py",
    "worker.rollout.base_url": "tests/rollout/test_placements_live.py",
    "worker.rollout.lora_sync": "tests/rollout/test_command.py",
    "worker.reward.skip_special_tokens": "tests/rollout/test_client.py",
}
# Options of which only one value is accepted: the checks refuse any other.
ONE_VALUE = {"worker.hybrid_engine": False, "worker.actor.strategy": "ddp"}
