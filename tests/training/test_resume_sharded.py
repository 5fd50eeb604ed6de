"""A run that is stopped by a signal and goes on ends as the unbroken one, to the last bit, in one process and in two
that share weights and states; it goes on with another number of processes; and the model that it leaves gives the
trainer's log-probs in transformers and in vLLM."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, AutoProcessor

from grpo_vlm.cli import main
from grpo_vlm.data.dataset import PromptDataset
from grpo_vlm.rollout.types import Completion
from tests.rollout.helpers import expected_logprobs
from tests.training.exported import TEXT, picture
from tests.training.rigs import rows, settings
from tests.training.saved import assert_same_run, files, metrics

ROOT = Path(__file__).parents[2]
BOUND = 1e-4  # of log-probs
ENV = {**os.environ, "OMP_NUM_THREADS": "1"}
OTHERS = ["multi_gpu", "zero2", "fsdp2"]


def run(place: Path, *jobs: str) -> None:
    subprocess.run([sys.executable, "-m", "tests.training.resumed", str(place), *jobs], check=True, env=ENV, cwd=ROOT)


def unbroken_and_broken(scheme: str, name: str) -> list[str]:
    return [f"{scheme} {name} on", f"{scheme} {name}-broken stop", f"{scheme} {name}-broken on"]


def moved(before: str, after: str) -> list[str]:
    """A run that goes on under another scheme, and one that does not. Their answers do not depend on the weights."""
    name = f"{before}-{after}-loose"
    return [f"{before} {name} stop", f"{after} {name} again", f"{before} {name}-unbroken on"]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """The folder of the runs that are not slow."""
    place = tmp_path_factory.mktemp("resumed")
    jobs = [*unbroken_and_broken("cpu", "one"), *unbroken_and_broken("zero3", "two")]
    run(place, *jobs, *moved("zero3", "cpu"), *moved("cpu", "zero3"))
    return place


@pytest.mark.parametrize("name", ["one", "two"])
def test_exact_resume_in_one_process_and_under_zero3(place, name):
    assert_same_run(place / name, place / f"{name}-broken")


@pytest.mark.slow
@pytest.mark.parametrize("scheme", OTHERS)
@pytest.mark.parametrize("name", ["full", "lora"])
def test_exact_resume_under_the_other_schemes(tmp_path, scheme, name):
    run(tmp_path, *unbroken_and_broken(scheme, name))
    assert_same_run(tmp_path / name, tmp_path / f"{name}-broken")


def largest_difference(left: Path, right: Path) -> float:
    ours, theirs = load_file(left), load_file(right)
    assert ours.keys() == theirs.keys()
    return max((ours[name] - theirs[name]).abs().max().item() for name in ours)


def assert_moved(place: Path, before: str, after: str) -> None:
    run_folder, whole = place / f"{before}-{after}-loose", place / f"{before}-{after}-loose-unbroken"
    saved, restored = files(run_folder, 2), files(run_folder, 1)  # what was loaded was saved again as step 1
    for name in ("state/rng.json", "state/optimizer.json", "state/loop.json"):
        saved.pop(name), restored.pop(name)
    assert saved == restored and "state/optimizer.safetensors" in saved
    for name in ("model/model.safetensors", "state/optimizer.safetensors"):
        earlier, ours, theirs = (
            run_folder / "global_step_2",
            run_folder / "global_step_4",
            whole / "global_step_4",
        )
        assert largest_difference(ours / name, theirs / name) < 1e-5
        assert largest_difference(ours / name, earlier / name) > 1e-4
    assert [line["actor/lr"] for line in metrics(run_folder)] == [line["actor/lr"] for line in metrics(whole)]


@pytest.mark.parametrize(("before", "after"), [("zero3", "cpu"), pytest.param("cpu", "zero3", marks=pytest.mark.slow)])
def test_another_number_of_processes(place, before, after):
    assert_moved(place, before, after)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [("fsdp2", "zero2"), ("zero2", "fsdp2"), ("multi_gpu", "cpu")])
def test_another_scheme(tmp_path, before, after):
    run(tmp_path, *moved(before, after))
    assert_moved(tmp_path, before, after)


# ---- the exported model


def of_trainer(model, processor, place: Path, name: str) -> float:
    """Largest difference of the exported model's log-probs from those that the trainer gave at the end."""
    scored = json.loads((place / name / "scored.json").read_text())
    prompt = PromptDataset(rows(12), settings(place, place / "none").data, processor)[scored["row"]]
    completion = Completion(tuple(scored["ids"]), (0.0,) * len(scored["ids"]), "length", "", 0)
    ours = expected_logprobs(model, prompt, completion, scored["banned"])
    return float((ours - torch.tensor(scored["logprobs"])).abs().max())


@torch.no_grad()
def of_text(model, processor, ids: list[int]) -> torch.Tensor:
    """Log-probs of TEXT after its first token."""
    inputs = processor(text=[TEXT], images=[picture()], return_tensors="pt")
    assert inputs["input_ids"][0].tolist() == ids
    scores = model(**inputs).logits[0].log_softmax(-1)
    return scores[:-1].gather(-1, inputs["input_ids"][0, 1:, None])[:, 0]


def assert_scores(place: Path, names: list[str], *options: str) -> None:
    folders = [place / f"{name}-out" for name in names]
    for name, folder in zip(names, folders, strict=True):
        assert main(["export", str(place / name), "--to", str(folder), *options]) == 0
    command = [sys.executable, "-m", "tests.training.exported", *map(str, folders)]
    done = subprocess.run(command, env=ENV, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("scored ")]
    for name, folder, line in zip(names, folders, lines, strict=True):
        model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
        processor = AutoProcessor.from_pretrained(folder)
        assert of_trainer(model, processor, place, name) < BOUND, name
        expected = of_text(model, processor, line["ids"])
        assert (torch.tensor(line["logprobs"]) - expected).abs().max() < BOUND, name


@pytest.mark.slow
def test_exported_models_score_as_the_trainer(place):
    assert_scores(place, ["one", "two"])


@pytest.mark.slow
def test_exported_models_of_the_other_schemes_and_merged_adapters(tmp_path):
    run(tmp_path, *(f"{scheme} {scheme} on" for scheme in OTHERS))
    assert_scores(tmp_path, OTHERS)
    adapted = [f"{scheme}-lora" for scheme in ("cpu", "zero3", "fsdp2")]
    run(tmp_path, *(f"{name.removesuffix('-lora')} {name} on" for name in adapted))
    assert_scores(tmp_path, adapted, "--merge")
