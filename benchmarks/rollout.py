"""The rollout server beside vLLM in one process: tokens/s on the same prompts, and what the server costs around them.
One command, under 8 minutes on an H200:

    python benchmarks/rollout.py --model FOLDER --out FILE.json        a model's folder, or 3b, 7b: made at random
    python benchmarks/rollout.py --device cpu --model tiny --prompts 16 --tokens 64 --side 112 --out FILE.json

Two parts, each a process of its own so that memory is fresh: `server` (the trainer's own engine: start, sync, answers
over HTTP, sleep and wake, start again) and `in_process` (vllm.LLM.generate with the server's arguments and the same
sampling). Caches of prompts and pictures are emptied before each repetition; vLLM's compile caches are empty before
the first start. FILE.json is rewritten after each part.
"""

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.summary import write_json
from benchmarks.train_steps import hardware, versions
from benchmarks.workload import MODELS, ROOT, model_folder
from grpo_vlm.config import Config, load_config
from grpo_vlm.data.dataset import PromptDataset
from grpo_vlm.rollout.command import server_command, server_environment, server_settings
from grpo_vlm.rollout.types import Request, Sampling, request_seed

LIMIT_S = 475.0
GIB = 2**30
QUESTION = "<image>Look at picture {index} closely. " + "What do you see, where is it, and how do you know? " * 8
CACHES = {"VLLM_CACHE_ROOT": "vllm", "TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="3b", help=f"a model's folder, or one of {', '.join(MODELS)}")
    parser.add_argument("--device", default="cuda" if torch.accelerator.is_available() else "cpu")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--group", type=int, default=8, help="completions per prompt")
    parser.add_argument("--tokens", type=int, default=300, help="tokens per completion")
    parser.add_argument("--side", type=int, default=560, help="pixels of a picture's side")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.3)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Runs the parts and puts their numbers together."""
    options = parse()
    if options.part:
        write_json(options.out, PARTS[options.part](options))
        return
    began = time.monotonic()
    result: dict[str, Any] = {
        "command": " ".join([Path(sys.executable).name, *sys.argv]),
        "gpu": (hardware()["devices"] or [None])[0],
        "versions": versions(),
        "hardware": hardware(),
        "workload": {name: getattr(options, name) for name in ("prompts", "group", "tokens", "side", "repeats")},
    }
    with tempfile.TemporaryDirectory(prefix="grpo_vlm-bench-") as scratch:
        os.environ |= {name: f"{scratch}/{folder}" for name, folder in CACHES.items()}
        options.model = str(made_model(options, Path(scratch)))
        settings = server_settings(configuration(options), options.device)
        in_process = server_environment(settings, "unused") | {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
        environments = {"server": os.environ, "in_process": in_process}
        for part in PARTS:
            out = Path(scratch, f"{part}.json")
            command = [sys.executable, __file__, *sys.argv[1:], "--part", part, "--out", str(out)]
            left = LIMIT_S - (time.monotonic() - began)
            print(f"{part}: begins after {LIMIT_S - left:.0f} s", flush=True)
            command += ["--model", options.model]
            try:
                subprocess.run(command, env=environments[part], timeout=left, check=True)
                result |= json.loads(out.read_text())
            except subprocess.SubprocessError as error:  # what the other part measures counts all the same
                result[f"{part}_failed"] = f"{type(error).__name__}, {time.monotonic() - began:.0f} s after the start"
            result |= compared(result) | {"took_s": round(time.monotonic() - began, 1)}
            write_json(options.out, result)
    print(
        json.dumps({name: value for name, value in result.items() if name not in ("versions", "hardware")}, indent=1)
    )


def made_model(options: argparse.Namespace, scratch: Path) -> Path:
    """The folder of the model, after it was written if it is one of the random ones."""
    folder = Path(options.model)
    if options.model not in MODELS or folder.is_dir():
        return folder
    folder = model_folder(options.model, scratch)
    if not folder.is_dir():
        script = str(ROOT / "benchmarks" / "models.py")
        subprocess.run([sys.executable, script, options.model, str(folder), "--device", options.device], check=True)
    return folder


def compared(result: dict[str, Any]) -> dict[str, float]:
    """What needs both parts."""
    names = ("tokens_per_s_http", "tokens_per_s_in_process", "digest_http", "digest_in_process")
    if any(name not in result for name in names):
        return {}
    ratio = result["tokens_per_s_http"] / result["tokens_per_s_in_process"]
    return {"ratio": round(ratio, 3), "same_tokens": result["digest_http"] == result["digest_in_process"]}


# --- what both parts use ---


def configuration(options: argparse.Namespace) -> Config:
    """The configuration of a run with this workload."""
    return load_config(
        None,
        [
            f"worker.actor.model.model_path={options.model}",
            "data.max_prompt_length=1024",
            f"data.max_response_length={options.tokens}",
            f"data.max_pixels={max(options.side**2, 3136)}",
            "data.min_pixels=3136",
            "worker.rollout.cpu_kv_cache_gb=2",
            f"worker.rollout.gpu_memory_utilization={options.gpu_memory_utilization}",
        ],
    )


def requests(options: argparse.Namespace, config: Config, processor: Any) -> list[Request]:
    """The workload: a picture of noise for each prompt."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for index in range(options.prompts):
        noise = torch.randint(0, 256, (options.side, options.side, 3), generator=generator, dtype=torch.uint8)
        picture = Image.fromarray(noise.numpy())
        rows.append({"problem": QUESTION.format(index=index), "images": [picture], "answer": "x"})
    data = dataclasses.replace(config.data, prompt_key="problem", answer_key="answer", image_key="images")
    dataset = PromptDataset(rows, data, processor)
    sampling = Sampling(n=options.group, max_tokens=options.tokens, ignore_eos=True)
    prompts = [dataset[index] for index in range(len(rows))]
    print(f"  {len(prompts)} prompts of {len(prompts[0].token_ids)} tokens", flush=True)
    return [Request(prompt, sampling, request_seed(0, 1, prompt.row_id, "benchmark")) for prompt in prompts]


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds and the value."""
    began = time.perf_counter()
    value = call()
    return time.perf_counter() - began, value


def median_speed(repeats: int, fresh: Callable[[], None], generate: Callable[[], int]) -> tuple[float, list[float]]:
    """Tokens/s: median, and each repetition's. `generate` gives the tokens; once unmeasured, to warm up."""
    speeds = []
    for repeat in range(repeats + 1):
        fresh()
        seconds, tokens = timed(generate)
        print(f"  {tokens} tokens in {seconds:.2f} s{'' if repeat else ' (warm-up)'}", flush=True)
        speeds.append(round(tokens / seconds, 1))
    return statistics.median(speeds[1:]), speeds[1:]


class Clock:
    """Processor time of some processes since it was made."""

    def __init__(self, *processes: psutil.Process) -> None:
        self.processes = processes
        self.before = self._now()

    def _now(self) -> list[float]:
        return [sum(process.cpu_times()[:2]) for process in self.processes]

    def used(self) -> dict[str, float]:
        """Seconds by process."""
        rows = zip(self.processes, self.before, self._now(), strict=True)
        return {f"{process.name()} {process.pid}": round(now - before, 1) for process, before, now in rows}


def digest(token_ids: list[list[int]]) -> str:
    """The same for the same completions."""
    return str(hash(tuple(tuple(ids) for ids in token_ids)))


# --- the parts ---


def server_part(options: argparse.Namespace) -> dict[str, Any]:
    """The trainer's engine, from its start to its second start."""
    from accelerate import Accelerator
    from transformers import AutoModelForImageTextToText, AutoProcessor

    from grpo_vlm.rollout.vllm_engine import VLLMEngine

    config, processor = configuration(options), AutoProcessor.from_pretrained(options.model)
    accelerator = Accelerator(cpu=options.device == "cpu")
    dtype = torch.float32 if options.device == "cpu" else torch.bfloat16
    model = AutoModelForImageTextToText.from_pretrained(options.model, dtype=dtype)
    run_dir = options.out.parent / "run"
    run_dir.mkdir(exist_ok=True)
    engine = VLLMEngine(config, processor=processor, model=model, accelerator=accelerator, run_dir=run_dir)
    result: dict[str, Any] = {}
    try:
        result["start_s"] = round(timed(engine.start)[0], 1)
        print(f"  started in {result['start_s']} s", flush=True)
        batch = requests(options, config, processor)
        model.to(accelerator.device)
        syncs = [timed(lambda version=version: engine.sync(model, version)) for version in range(4)]
        result |= {"sync_first_s": round(syncs[0][0], 3), "sync_gb": round(syncs[0][1]["sync/gb"], 2)}
        result["sync_s"] = round(statistics.median(seconds for seconds, _ in syncs[1:]), 3)
        result |= answers_over_http(options, engine, batch)
        result |= sleep_and_wake(engine, model)
        model.to("cpu")
        result["free_gib_asleep"] = free_gib_asleep(engine)
    finally:
        engine.close()
    try:
        result["restart_s"] = round(timed(engine.start)[0], 1)
    finally:
        engine.close()
    return result


def answers_over_http(options: argparse.Namespace, engine: Any, batch: list[Request]) -> dict[str, Any]:
    """Tokens/s through the engine; the processor time is client's, API process's and engine's, of all repetitions."""
    last: list[Any] = []

    def fresh() -> None:
        for path in ("/reset_prefix_cache", "/reset_encoder_cache", "/reset_mm_cache"):
            engine.client.post(path)

    def generate() -> int:
        last[:] = engine.generate(batch)
        return sum(len(completion.token_ids) for row in last for completion in row)

    clock = Clock(psutil.Process(), *psutil.Process(engine.server.process.pid).children(recursive=True))
    speed, speeds = median_speed(options.repeats, fresh, generate)
    token_ids = [list(completion.token_ids) for row in last for completion in row]
    return {
        "tokens_per_s_http": speed,
        "tokens_per_s_http_each": speeds,
        "cpu_s_http": clock.used(),
        "digest_http": digest(token_ids),
    }


def sleep_and_wake(engine: Any, model: Any) -> dict[str, Any]:
    """Seconds from the last answer of a step to the first request of the next, training left out."""
    rounds = []
    for version in range(4, 7):
        asleep_s = timed(engine.release)[0]
        rounds.append((asleep_s, timed(lambda version=version: engine.sync(model, version))[0]))
    both = statistics.median(sum(pair) for pair in rounds)
    return {"sleep_wake_sync_s": round(both, 3), "sleep_s": round(statistics.median(pair[0] for pair in rounds), 3)}


def free_gib_asleep(engine: Any) -> float | None:
    """Free memory of the device while the server sleeps and nothing of a trainer is loaded."""
    if not torch.accelerator.is_available():
        return None
    engine.release()
    torch.accelerator.empty_cache()
    device = torch.get_device_module(torch.accelerator.current_accelerator())
    return round(device.mem_get_info()[0] / GIB, 1)


def in_process_part(options: argparse.Namespace) -> dict[str, Any]:
    """vllm.LLM with the arguments and the environment of the server, without a trainer."""
    from transformers import AutoConfig, AutoProcessor, GenerationConfig
    from vllm import LLM, EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from grpo_vlm.rollout.client import VLLMClient
    from grpo_vlm.rollout.route import sampling_params
    from grpo_vlm.rollout.types import banned_token_ids, eos_token_ids

    config = configuration(options)
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    given, _ = parser.parse_known_args(server_command(server_settings(config, options.device), 1)[3:])
    arguments = vars(EngineArgs.from_cli_args(given)) | {"load_format": "auto"}
    llm = LLM(**arguments)
    processor = AutoProcessor.from_pretrained(options.model)
    batch = requests(options, config, processor)
    asked = VLLMClient(
        "http://127.0.0.1:1",
        "unused",
        tokenizer=processor.tokenizer,
        eos_ids=eos_token_ids(processor, GenerationConfig.from_pretrained(options.model)),
        banned_ids=banned_token_ids(processor, AutoConfig.from_pretrained(options.model)),
    )
    inputs = [
        {
            "prompt_token_ids": processor.tokenizer(request.prompt.text)["input_ids"],
            "multi_modal_data": {"image": request.prompt.images},
        }
        for request in batch
    ]
    params = [sampling_params(**asked.sampling(request)) for request in batch]
    last: list[Any] = []

    def fresh() -> None:
        llm.reset_prefix_cache()
        llm.llm_engine.reset_encoder_cache()

    def generate() -> int:
        last[:] = llm.generate(inputs, params, use_tqdm=False)
        return sum(len(completion.token_ids) for output in last for completion in output.outputs)

    clock = Clock(psutil.Process(), *psutil.Process().children(recursive=True))
    speed, speeds = median_speed(options.repeats, fresh, generate)
    for output, request in zip(last, batch, strict=True):
        assert output.prompt_token_ids == request.prompt.token_ids, "the two saw other prompts"
    token_ids = [list(completion.token_ids) for output in last for completion in output.outputs]
    return {
        "tokens_per_s_in_process": speed,
        "tokens_per_s_in_process_each": speeds,
        "cpu_s_in_process": clock.used(),
        "digest_in_process": digest(token_ids),
    }


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "server": server_part,
    "in_process": in_process_part,
}

if __name__ == "__main__":
    main()
