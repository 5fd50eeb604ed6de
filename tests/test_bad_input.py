"""What a user can get wrong: one clear message that names the key or the row and the remedy, exit code 2, no
traceback, nothing left behind."""

import io
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import yaml
from PIL import Image

import train
from tests.tiny import tiny_model

ROOT = Path(__file__).parents[1]
REWARDS = """
def good(reward_inputs):
    return [{"overall": 1.0} for _ in reward_inputs]

def too_few(reward_inputs):
    return [{"overall": 1.0}]

def not_a_number(reward_inputs):
    return [{"overall": float("nan")} for _ in reward_inputs]

def raises(reward_inputs):
    return [{"overall": item["ground_truth"] / 2} for item in reward_inputs]
"""


def row(number: int, **changes) -> dict:
    picture = io.BytesIO()
    Image.new("RGB", (64, 64), (number * 20, 0, 0)).save(picture, "PNG")
    name = f"{number}.png"
    Path(name).write_bytes(picture.getvalue())
    return {"problem": "<image>Which colour?", "images": [name], "answer": "red", **changes}


@pytest.fixture
def place(tmp_path, monkeypatch, tmp_path_factory):
    """A folder with a sound run in it: rows, pictures, a reward file, a configuration."""
    monkeypatch.chdir(tmp_path)
    write_rows([row(number) for number in range(8)])
    Path("reward.py").write_text(REWARDS)
    config = {
        "data": {
            "train_files": "rows.jsonl",
            "prompt_key": "problem",
            "image_dir": str(tmp_path),
            "min_pixels": 3136,
            "max_pixels": 50176,
            "max_prompt_length": 128,
            "max_response_length": 8,
            "rollout_batch_size": 4,
        },
        "algorithm": {"disable_kl": True},
        "worker": {
            "actor": {
                "global_batch_size": 4,
                "micro_batch_size_per_device_for_update": 4,
                "micro_batch_size_per_device_for_experience": 4,
                "model": {"model_path": str(tiny_model("qwen2_5_vl", tmp_path_factory.getbasetemp()))},
            },
            "rollout": {"name": "transformers", "n": 4},
            "reward": {"reward_function": "./reward.py:good"},
        },
        "trainer": {"max_steps": 1, "save_checkpoint_path": "run"},
    }
    Path("config.yaml").write_text(yaml.safe_dump(config))
    return tmp_path


def write_rows(rows: list[dict]) -> None:
    Path("rows.jsonl").write_text("".join(json.dumps(item) + "\n" for item in rows))


def occupied_port() -> socket.socket:
    taken = socket.socket()
    taken.bind(("127.0.0.1", 0))
    taken.listen()
    return taken


def broken_picture():
    Path("3.png").write_bytes(Path("3.png").read_bytes()[:60])


def occupied_folder():
    Path("run").mkdir()
    Path("run/thesis.txt").write_text("years of work")


# what is wrong -> what prepares it, the overrides, and what the message must say
CASES = {
    "unknown key": (
        None,
        ["worker.rollout.temprature=0.5"],
        ["worker.rollout.temprature", "worker.rollout.temperature"],
    ),
    "wrong type": (None, ["data.rollout_batch_size=many"], ["data.rollout_batch_size", "many"]),
    "indivisible batch sizes": (
        None,
        ["worker.actor.global_batch_size=3"],
        ["rollout_batch_size", "global_batch_size", "4", "3"],
    ),
    "n=1 with grpo": (None, ["worker.rollout.n=1"], ["worker.rollout.n", "grpo"]),
    "missing file": (None, ["data.train_files=absent.parquet"], ["data.train_files", "absent.parquet"]),
    "missing column": (None, ["data.answer_key=solution"], ["solution", "data.answer_key", "problem"]),
    "image count": (
        lambda: write_rows([row(n) for n in range(5)] + [row(5, images=["0.png", "1.png"])]),
        [],
        ["rows.jsonl:5", "2", "1"],
    ),
    "broken image": (broken_picture, [], ["rows.jsonl:3"]),
    "reward file absent": (None, ["worker.reward.reward_function=./rewrad.py:good"], ["rewrad.py"]),
    "reward function absent": (None, ["worker.reward.reward_function=./reward.py:goood"], ["goood", "good"]),
    "wrong number of scores": (
        None,
        ["worker.reward.reward_function=./reward.py:too_few"],
        ["too_few", "returned 1", "16"],
    ),
    "NaN score": (
        None,
        ["worker.reward.reward_function=./reward.py:not_a_number"],
        ["not_a_number", "nan", "rows.jsonl:"],
    ),
    "raising reward": (
        None,
        ["worker.reward.reward_function=./reward.py:raises"],
        ["raises", "rows.jsonl:", "TypeError", 'item["ground_truth"] / 2'],
    ),
    "model path absent": (
        None,
        ["worker.actor.model.model_path=./no/model"],
        ["worker.actor.model.model_path", "no/model"],
    ),
    "occupied run folder": (occupied_folder, [], ["run", "thesis.txt", "trainer.save_checkpoint_path"]),
}


def files(place: Path) -> set[str]:
    return {str(path.relative_to(place)) for path in place.rglob("*") if "__pycache__" not in str(path)}


@pytest.mark.parametrize("case", CASES)
def test_one_message_exit_code_two_nothing_left(case, place, capfd):
    prepare, overrides, said = CASES[case]
    if prepare:
        prepare()
    before, children = files(place), psutil.Process().children(recursive=True)
    assert train.main(["--config", "config.yaml", *overrides]) == 2
    message = capfd.readouterr().err
    for words in said:
        assert words in message, message
    assert ("Traceback" in message) == (case == "raising reward")  # the user's own lines are shown, none of ours
    assert "grpo_vlm/" not in message
    assert files(place) == before
    assert psutil.Process().children(recursive=True) == children


def test_port_in_use(place, capfd):
    with occupied_port() as taken:
        port = taken.getsockname()[1]
        before = files(place)
        assert train.main(["--config", "config.yaml", "worker.rollout.name=vllm", f"worker.rollout.port={port}"]) == 2
    message = capfd.readouterr().err
    assert "worker.rollout.port" in message and str(port) in message and files(place) == before


@pytest.mark.parametrize("first", [["config=config.yaml"], ["--config", "config.yaml"]])
def test_one_configuration_file_only(place, capfd, first):
    assert train.main([*first, "--config", "other.yaml"]) == 2
    error = capfd.readouterr().err
    assert "--config is given 2 times" in error and "config.yaml" in error and "other.yaml" in error


def test_all_faults_of_a_configuration_come_at_once(place, capfd):
    wrong = ["worker.rollout.temprature=1", "data.rollout_batch_size=many", "trainer.logger=[carrier_pigeon]"]
    assert train.main(["--config", "config.yaml", *wrong]) == 2
    message = capfd.readouterr().err
    assert all(word in message for word in ("temprature", "many", "carrier_pigeon")), message


def test_the_command_exits_with_two_and_no_traceback(place):
    command = [sys.executable, str(ROOT / "train.py"), "--config", "config.yaml", "worker.rollout.n=1"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 2, done.stderr
    assert "worker.rollout.n" in done.stderr and "Traceback" not in done.stderr
