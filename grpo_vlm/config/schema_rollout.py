"""Schema of worker.rollout (generation) and worker.reward (scoring)."""

from dataclasses import dataclass
from typing import Any

from grpo_vlm.config.options import (
    NEUTRAL,
    Rule,
    above,
    above_to,
    at_least,
    between,
    from_to_below,
    off_or_at_least,
    option,
)


@dataclass
class RolloutConfig:
    """How responses are generated."""

    name: str = option(
        "vllm",
        "Engine: vllm (a server process that the trainer starts) or transformers (the trained model itself, slower).",
        choices=("vllm", "transformers"),
        refused={"sglang": "this version generates with vllm or transformers"},
    )
    n: int = option(
        1, "Responses per prompt, the group. grpo needs at least 2.", rule=at_least(1), common=True, example="8"
    )
    temperature: float = option(1.0, "Sampling temperature in training.", rule=above(0), common=True)
    top_p: float = option(1.0, "Keep the most likely tokens up to this probability. 1: all.", rule=above_to(0, 1))
    top_k: int = option(-1, "Keep this many most likely tokens. -1: all.", rule=off_or_at_least(1))
    min_p: float = option(
        0.0, "Drop tokens less likely than this times the likeliest. 0: keep all.", rule=from_to_below(0, 1)
    )
    repetition_penalty: float = option(
        1.0, "Above 1, tokens that the prompt or answer has already become less likely.", rule=above(0)
    )
    stop: list[str] = option(
        [], "Texts that end a response, besides its end token; they stay in it.", example='["</answer>"]'
    )
    seed: int = option(1, "Seed of the sampling.", rule=at_least(0))
    limit_images: int = option(
        0, "Most images per prompt that the engine accepts. 0: as many as the rows have.", rule=at_least(0)
    )
    dtype: str = option(
        "auto",
        "Type of the engine's weights. auto: bf16 on an accelerator, float32 on a CPU.",
        choices=("auto", "bf16", "bfloat16", "fp16", "float16", "fp32", "float32"),
    )
    gpu_memory_utilization: float = option(
        0.6, "Share of the GPU's memory that the engine takes for weights and cache.", rule=above_to(0, 1), common=True
    )
    ignore_eos: bool = option(False, "Generate up to max_response_length even after the end token (for benchmarks).")
    enforce_eager: bool = option(False, "Start faster, without compiled graphs; generation is slower on a GPU.")
    enable_chunked_prefill: bool = option(False, "Let the engine split long prompts over several passes.")
    placement: str = option(
        "shared",
        "Where the server runs. shared: on the training processes' GPUs, asleep while they train; dedicated: on "
        "`gpus`; external: it runs already, at `base_url`.",
        choices=("shared", "dedicated", "external"),
    )
    gpus: list[int] = option(
        [],
        "With placement dedicated: the server's GPUs, numbered as the training processes see them. Those take GPU 0 "
        "and up, one each, so start fewer of them (--num_processes).",
        rule=at_least(0),
        example="[6, 7]",
    )
    base_url: str | None = option(
        None,
        "With placement external: address of a server that `python -m grpo_vlm.rollout.serve` started. Its key is "
        "read from the environment variable GRPO_VLM_ROLLOUT_KEY.",
        example="http://127.0.0.1:8000",
    )
    tensor_parallel_size: int | None = option(
        None, "GPUs that share one engine, for models too large for one. null: 1.", rule=at_least(1)
    )
    data_parallel_size: int | None = option(
        None,
        "Engines side by side behind the one server. null: as many as the GPUs of the placement hold.",
        rule=at_least(1),
    )
    max_model_len: int | None = option(
        None, "Longest prompt + response. null: max_prompt_length + max_response_length.", rule=at_least(1)
    )
    max_num_batched_tokens: int = option(8192, "Most tokens in one pass of the engine.", rule=at_least(1))
    disable_log_stats: bool = option(True, "No engine statistics in vllm.log.")
    disable_tqdm: bool = option(
        False, "No progress bar.", status=NEUTRAL, reason="the console shows its own progress and no bar"
    )
    val_override_config: dict[str, Any] = option(
        {},
        "Sampling in validation where it differs: temperature, top_p, top_k, min_p, repetition_penalty, n, "
        "max_tokens.",
        example="{temperature: 0.6, top_p: 0.95, n: 1}",
    )
    port: int | None = option(
        None, "Port of the engine's server on this machine. null: a free one.", rule=between(1, 65535)
    )
    start_timeout_s: float = option(600.0, "Seconds the engine may take to start.", rule=above(0))
    request_timeout_s: float = option(600.0, "Seconds one request may take.", rule=above(0))
    step_timeout_s: float = option(
        3600.0, "Seconds all responses of a rollout step may take, restarts of the server included.", rule=above(0)
    )
    max_restarts: int = option(
        3, "How often in a run a server that died or hangs is started again before the run ends.", rule=at_least(0)
    )
    cpu_kv_cache_gb: float = option(1.0, "Cache of the engine on a CPU, in GiB.", rule=above(0))
    engine_kwargs: dict[str, Any] = option(
        {}, "More arguments of vLLM's server, by their names.", example="{max_num_seqs: 256, kv_cache_dtype: fp8}"
    )
    lora_sync: str = option(
        "merged",
        "How LoRA weights reach the server. merged: added into the model's weights; adapter: as an adapter, which "
        "moves less and is computed beside the weights.",
        choices=("merged", "adapter"),
    )
    sync_check_every: int = option(
        50,
        "Compare log-probabilities of trainer and server on a probe prompt every so many steps, and after the first "
        "three syncs of a new run. -1: never.",
        rule=off_or_at_least(1),
    )
    sync_check_tolerance: float | None = option(
        None,
        "Mean difference of log-probabilities above which the run stops. null: 0.1 for bf16, 0.03 for fp16 and 0.001 "
        "for fp32 engines.",
        rule=above(0),
    )


# The keys that only the vLLM server uses.
VLLM_ONLY = (
    "dtype",
    "limit_images",
    "enable_chunked_prefill",
    "placement",
    "gpus",
    "base_url",
    "tensor_parallel_size",
    "data_parallel_size",
    "max_model_len",
    "gpu_memory_utilization",
    "enforce_eager",
    "max_num_batched_tokens",
    "disable_log_stats",
    "port",
    "start_timeout_s",
    "request_timeout_s",
    "step_timeout_s",
    "max_restarts",
    "cpu_kv_cache_gb",
    "engine_kwargs",
    "lora_sync",
    "sync_check_every",
    "sync_check_tolerance",
)
# Of these, what decides how a server of ours is started; one that runs already has been given its own.
STARTS_SERVER = (
    "limit_images",
    "enable_chunked_prefill",
    "tensor_parallel_size",
    "data_parallel_size",
    "gpu_memory_utilization",
    "enforce_eager",
    "max_num_batched_tokens",
    "disable_log_stats",
    "port",
    "max_restarts",
    "cpu_kv_cache_gb",
    "engine_kwargs",
)

# The inner keys of val_override_config: name -> (type, rule). Temperature 0 is greedy decoding.
VAL_OVERRIDES: dict[str, tuple[str, Rule]] = {
    "temperature": ("float", at_least(0)),
    "top_p": ("float", above_to(0, 1)),
    "top_k": ("int", off_or_at_least(1)),
    "min_p": ("float", from_to_below(0, 1)),
    "repetition_penalty": ("float", above(0)),
    "n": ("int", at_least(1)),
    "max_tokens": ("int", at_least(1)),
}


@dataclass
class RewardConfig:
    """How responses are scored."""

    reward_function: str | None = option(
        None,
        "FILE.py:function (function is main by default) or package.module:function.",
        common=True,
        example="./rewards/geo3k.py:compute_score",
    )
    reward_function_kwargs: dict[str, Any] = option(
        {}, "Keyword arguments passed to the reward function at each call; of several, to those that take them."
    )
    reward_functions: list[str] = option(
        [],
        "Several functions in place of reward_function. The reward is their weighted sum; each one's own score is "
        "logged under its name.",
        example="[./rewards/geo3k.py:compute_score, my_rewards.py:brevity]",
    )
    reward_weights: list[float] = option(
        [], "Weight of each of reward_functions. Empty: 1 each.", example="[1.0, 0.2]"
    )
    num_workers: int | None = option(
        None,
        "Processes per training process that call the reward. null: one per core of its share, 2 to 8. A function "
        "that takes the whole batch uses one at a time.",
        rule=at_least(1),
    )
    timeout_s: float = option(
        30.0, "Seconds the reward may take for one sample; then its process is killed.", rule=above(0)
    )
    memory_limit_gb: float = option(
        8.0, "Memory in GiB that one reward process may take beyond what importing the file took.", rule=above(0)
    )
    max_concurrency: int = option(
        64, "Calls of an asynchronous reward function that are in flight at a time.", rule=at_least(1)
    )
    on_error: str = option(
        "none",
        "What a sample gets whose scoring takes too long, raises or ends its process. none: no score, it leaves its "
        "group; zero: 0; raise: the run ends. At the start of a run such a sample always ends it.",
        choices=("none", "zero", "raise"),
    )
    skip_special_tokens: bool = option(True, "Leave special tokens out of the text that is scored.")
    num_cpus: int = option(
        1, "Cores of the reward worker.", status=NEUTRAL, reason="worker.reward.num_workers says how many processes"
    )
