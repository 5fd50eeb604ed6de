"""What a run is said to need, beside what was measured on an H200; plan.json of a real run; the dry run."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.models import build_processor, model_config
from benchmarks.ours_update import checked
from grpo_vlm.cli import main
from grpo_vlm.config.check_sharding import DDP, FSDP2, ZERO, Launched
from grpo_vlm.dry_run import launch_variables
from grpo_vlm.errors import ConfigError
from grpo_vlm.model.gpus import named
from grpo_vlm.model.memory import Counts, Widths, training_parts
from grpo_vlm.training.forecast import Typical, _Planner
from tests.training.rigs import session, settings

ROOT = Path(__file__).parents[2]
GEO3K = ROOT / "tests" / "data" / "geo3k_40.parquet"
ONE = Launched("one process")


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """Folders with the config.json and processor of the real shapes, and no weights."""
    root, processor = tmp_path_factory.mktemp("shapes"), build_processor()
    for name in ("3b", "7b"):
        processor.save_pretrained(root / name)
        model_config(name).save_pretrained(root / name)
    return {name: root / name for name in ("3b", "7b")}


def plan(folder: Path, work: dict, row_tokens: int, *, launch=ONE, processes=1, **changes):
    """Of a workload as the benchmarks have it."""
    values = {
        "worker.actor.model.model_path": str(folder),
        "worker.actor.fsdp.torch_dtype": "bf16",
        "worker.actor.max_token_len_per_gpu": row_tokens,
        "worker.actor.global_batch_size": work["prompts"],
        "data.rollout_batch_size": work["prompts"],
        "data.max_response_length": work["longest"],
        "worker.rollout.n": work["group"],
        "worker.rollout.gpu_memory_utilization": 0.3,
        "algorithm.disable_kl": True,
        **changes,
    }
    side = 2 * round(work["image_tokens"] ** 0.5)
    answer = (work["shortest"] + work["longest"]) // 2
    typical = Typical(work["image_tokens"] + 139, ((1, side, side),), answer)
    return _Planner(checked(values, []), typical, named("h200"), launch, processes).forecast()


def measured() -> list:
    """(workload, row tokens, checkpointing, peak in GB, seconds of forward and backward) of each H200 run."""
    found = []
    for name in (
        "update_h200",
        "update_h200_rows12288",
        "update_h200_g16",
        "update_h200_table",
        "update_h200_7b_table",
    ):
        file = json.loads((ROOT / "benchmarks" / f"{name}.json").read_text())
        for entry in file.get("table", [file]):
            for kind in ("ours", "ours_checkpointing"):
                if kind not in entry["raw"]:
                    continue
                part, suffix = entry["raw"][kind], kind.removeprefix("ours")
                peak = max(step["peak_gb"] for step in part["steps"][1:])
                seconds = entry[f"seconds_forward_backward{suffix}"]
                found.append((entry["workload"], part["row_tokens"], bool(suffix), peak, seconds))
    return found


def test_peaks_and_seconds_are_those_of_the_h200(folders):
    cases = measured()
    assert {(work["model"], checkpointing) for work, _, checkpointing, _, _ in cases} == {
        ("3b", False),
        ("3b", True),
        ("7b", True),
    }
    for work, row_tokens, checkpointing, peak, seconds in cases:
        key = "worker.actor.model.enable_gradient_checkpointing"
        got = plan(folders[work["model"]], work, row_tokens, **{key: checkpointing})
        assert got.peak_gb == pytest.approx(peak, rel=0.15), (work, got.update_gb)
        assert got.seconds["update_actor"] == pytest.approx(seconds, rel=0.30), work


def test_a_whole_step_is_that_of_the_h200(folders):
    file = json.loads((ROOT / "benchmarks" / "step_h200.json").read_text())
    got = plan(folders["3b"], file["workload"], 12288, **{"worker.actor.model.enable_gradient_checkpointing": False})
    for phase in ("gen", "update_actor", "sync"):
        assert got.seconds[phase] == pytest.approx(file["numbers"]["phases_s"][phase], rel=0.30), phase
    assert got.seconds["step"] == pytest.approx(file["numbers"]["seconds_step"], rel=0.30)
    assert not got.remarks  # it ran


@pytest.mark.parametrize(
    ("launch", "processes", "gigabytes"),
    [  # 1e9 trained float32 weights, computed in bf16
        (ONE, 1, {"weights": 4, "gradients": 4, "optimizer states": 8, "bf16 copies of the weights": 2}),
        (Launched(DDP), 4, {"weights": 4, "gradients": 4, "optimizer states": 8, "buffers of the sharding scheme": 4}),
        (Launched(ZERO, 2), 4, {"weights": 2, "gradients": 0.5, "optimizer states": 3}),
        (Launched(ZERO, 3), 4, {"weights": 0.5, "gradients": 0.5, "optimizer states": 3}),
        (Launched(ZERO, 3, True, True), 4, {"weights": 0, "gradients": 0.5, "optimizer states": 0}),
        (Launched(FSDP2), 4, {"weights": 1, "gradients": 1, "optimizer states": 2}),
    ],
)
def test_schemes_divide_what_they_say(folders, launch, processes, gigabytes):
    config = checked({"worker.actor.model.model_path": str(folders["3b"]), "worker.rollout.n": 2}, [])
    counts = Counts(10**9, 10**9, 0, 10**7, 10**8)
    widths = Widths.of(config, launch, accelerator=True, adapters=False)
    parts = training_parts(counts, widths, launch, processes, reference=False, checkpointing=True)
    found = {part.name: part.bytes / 1e9 for part in parts}
    assert {name: found[name] for name in gigabytes} == pytest.approx(gigabytes)


def test_what_does_not_fit_has_a_remedy(folders):
    work = {"prompts": 16, "group": 8, "image_tokens": 400, "shortest": 100, "longest": 500}
    changes = {"worker.actor.fsdp.torch_dtype": None, "worker.rollout.gpu_memory_utilization": 0.6}
    full = plan(folders["7b"], work, 12288, **changes)
    assert "the update does not fit" in full.remarks[0] and "zero3.yaml" in full.remarks[0]
    assert any("gpu_memory_utilization" in remark for remark in full.remarks)
    lora = plan(folders["7b"], work, 12288, **{"worker.actor.model.lora.rank": 64})
    assert not lora.remarks and lora.update_gb["optimizer states"] < 2 < 16 < lora.update_gb["weights"]


def test_gpus_are_found_by_their_whole_words():
    assert named("H20").name == "NVIDIA H20" and named("h200").memory > named("h20").memory
    with pytest.raises(ConfigError, match="A100-PCIE-40GB"):
        named("a100")
    with pytest.raises(ConfigError, match="not known"):
        named("abacus")


@pytest.mark.parametrize("name", ["cpu", "single_gpu", "multi_gpu", "zero2", "zero3", "zero3_offload", "fsdp2"])
def test_the_launchers_files_are_understood(name):
    from grpo_vlm.config.check_sharding import launched

    launch = launched(launch_variables(str(ROOT / "accelerate_configs" / f"{name}.yaml")))
    wanted = {"zero2": "DeepSpeed ZeRO-2", "zero3": "DeepSpeed ZeRO-3", "zero3_offload": "DeepSpeed ZeRO-3"}
    wanted |= {"fsdp2": "FSDP2", "multi_gpu": "DDP"}
    assert launch.name == wanted.get(name, launch.name)
    assert launch.weights_on_cpu == launch.optimizer_on_cpu == (name == "zero3_offload")


def test_the_dry_run_of_7b_needs_no_weights(folders):
    assert not list(folders["7b"].glob("*.safetensors"))
    command = [sys.executable, "train.py", "--dry-run", "--gpu", "h200", "--launch", "accelerate_configs/zero3.yaml"]
    command += ["--config", "configs/geo3k_qwen2_5_vl_7b.yaml", f"worker.actor.model.model_path={folders['7b']}"]
    command += [f"data.train_files={GEO3K}", f"data.val_files={GEO3K}", "trainer.max_steps=60"]
    began = time.monotonic()
    run = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stdout + run.stderr
    assert time.monotonic() - began < 20 * max(1.0, os.getloadavg()[0] / 2)  # 20 s on two free cores
    text = run.stdout
    assert "512 prompts x 5 answers = 2,560 samples a step, 4 update(s) of 640; 60 steps" in text
    assert "40 of the first 40 rows are usable" in text and "reward of the bare gold answers" in text
    assert "DeepSpeed ZeRO-3" in text and "it fits" in text and "rollout_batch_size: 512" in text


def test_options_of_the_dry_run_alone(capsys):
    assert main(["train", "--gpu", "h200"]) == 2
    assert "--dry-run" in capsys.readouterr().err


def test_a_run_keeps_its_plan_beside_what_it_measured(tmp_path, tmp_path_factory):
    with session(
        settings(tmp_path_factory.getbasetemp(), tmp_path / "run", **{"trainer.val_before_train": False})
    ) as run:
        run.train()
    kept = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert kept["predicted"]["update_gb"]["weights"] > 0 and kept["predicted"]["processes"] == 1
    assert kept["measured"]["steps"] == 1 and kept["measured"]["seconds"]["update_actor"] > 0
