"""What the configuration points at: present, of the right kind, and found without importing anything."""

import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from grpo_vlm.config.check_files import is_local
from grpo_vlm.config.locations import split_source

Check = Callable[..., list[str]]


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ("data.train_files=''", "data.train_files: is empty; name the rows, e.g. hiyouga/geometry3k@train"),
        ("worker.actor.model.model_path=null", "worker.actor.model.model_path: is empty; name a folder or hub id"),
        ("worker.reward.reward_function=null", "worker.reward.reward_function: is empty; name FILE.py:function"),
    ],
)
def test_required_keys(item: str, message: str, faults: Check) -> None:
    (text,) = faults(item)
    assert text.startswith(message)


def test_python_objects_take_the_place_of_files(notices: Check) -> None:
    items = ["data.train_files=''", "data.val_files=''", "worker.reward.reward_function=null", "trainer.val_freq=5"]
    assert notices(*items, needs_reward=False, needs_train_files=False, has_val_rows=True) == []
    absent = ["data.train_files=no/train.parquet", "data.val_files=no/test.parquet", items[2]]
    assert notices(*absent, needs_reward=False, needs_train_files=False, has_val_rows=True) == []


@pytest.mark.parametrize("item", ["trainer.val_only=true", "trainer.val_freq=5"])
def test_validation_needs_rows(item: str, faults: Check) -> None:
    (text,) = faults("data.val_files=''", item)
    assert text.startswith(f"{item.partition('=')[0]}: asks for validation, but data.val_files is empty")


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ("data.train_files=trian.parquet", "data.train_files: there is no trian.parquet; did you mean train.parquet?"),
        (
            "data.train_files=data/none/x.jsonl@train",
            "data.train_files: there is no data/none/x.jsonl; the working dir",
        ),
        ("data.val_files=./val", "data.val_files: there is no ./val; "),
        ("data.val_files=org/name@", "data.val_files: 'org/name@' ends with @; name the split, e.g. org/name@train"),
        ("data.format_prompt=prompt.jinj", "data.format_prompt: there is no prompt.jinj; did you mean prompt.jinja?"),
        ("data.format_prompt=model", "data.format_prompt: model is a folder; expected a file"),
        ("data.override_chat_template=no.jinja", "data.override_chat_template: there is no no.jinja"),
        ("data.image_dir=pictures", "data.image_dir: there is no pictures"),
        ("data.image_dir=train.parquet", "data.image_dir: train.parquet is a file; expected a folder"),
        (
            "worker.actor.model.model_path=./modle",
            "worker.actor.model.model_path: there is no ./modle; did you mean model?",
        ),
        (
            "worker.actor.model.model_path=a/b/c",
            "worker.actor.model.model_path: there is no a/b/c; the working directory is",
        ),
        ("worker.actor.model.tokenizer_path=~/no/such", "worker.actor.model.tokenizer_path: there is no ~/no/such"),
        ("worker.actor.model.model_path=.", "worker.actor.model.model_path: . holds no config.json"),
        (
            "trainer.load_checkpoint_path=runs/last",
            "trainer.load_checkpoint_path: runs/last must end in global_step_N",
        ),
        (
            "trainer.load_checkpoint_path=runs/global_step_5",
            "trainer.load_checkpoint_path: there is no runs/global_step_5",
        ),
        ("trainer.save_checkpoint_path=reward.py/run", "trainer.save_checkpoint_path: "),
    ],
)
def test_a_path_that_is_not_there_or_not_right(item: str, message: str, faults: Check) -> None:
    (text,) = faults(item)
    assert text.startswith(message)


@pytest.mark.parametrize(
    "item",
    [
        "data.train_files=hiyouga/geometry3k@train",
        "data.train_files=train.parquet@train",
        "data.train_files=model",
        "data.format_prompt=prompt.jinja",
        "data.image_dir=model",
        "worker.actor.model.model_path=Qwen/Qwen2.5-VL-3B-Instruct",
        "worker.actor.model.tokenizer_path=model",
        "trainer.load_checkpoint_path=global_step_5",
        "trainer.save_checkpoint_path=runs/new",
        "worker.reward.reward_function=reward.py:compute_score",
        "worker.reward.reward_function=json:loads",
        "worker.reward.reward_function=email.mime.text:MIMEText",
        "worker.reward={reward_function: null, reward_functions: [reward.py:compute_score, json:loads], "
        "reward_weights: [1, 0.5]}",
    ],
)
def test_what_is_there_is_accepted(item: str, folder: Path, notices: Check) -> None:
    (folder / "global_step_5").mkdir()
    assert notices(item) == []


@pytest.mark.parametrize(
    ("value", "local"),
    [
        ("Qwen/Qwen2.5-VL-3B-Instruct", False),
        ("gpt2", False),
        ("./x", True),
        ("../x", True),
        ("/x/y", True),
        ("~/x", True),
        ("grpo_vlm/demo/model", True),
        ("data/train.parquet", True),
        ("my data", True),
    ],
)
def test_paths_and_hub_ids(value: str, local: bool) -> None:
    assert is_local(value) is local


def test_the_split_of_a_source(folder: Path) -> None:
    assert split_source("a/b") == ("a/b", "train")
    assert split_source("a/b@test") == ("a/b", "test")
    (folder / "x@y.jsonl").write_text("")
    assert split_source("x@y.jsonl") == ("x@y.jsonl", "train")
    assert split_source("x@y.jsonl@val") == ("x@y.jsonl", "val")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("./rewards.py:compute_score", "there is no ./rewards.py; did you mean reward.py?"),
        (
            "./reward.py:compute_scor",
            "reward.py has no function compute_scor; did you mean ./reward.py:compute_score?",
        ),
        ("./reward.py", "reward.py has no function main; did you mean ./reward.py:compute_score?"),
        ("./empty.py:f", "empty.py has no function f; it defines no function"),
        ("./broken.py:f", "broken.py is not valid Python, line 2: "),
        ("./model:f", "'./model:f' is not of the form FILE.py:function or package.module:function"),
        ("no_such_package.part:f", "there is no module no_such_package.part on Python's path"),
        ("json.no_such:f", "there is no module json.no_such on Python's path"),
        ("json:laods", "has no function laods; did you mean json:loads?"),
    ],
)
def test_a_reward_function_that_is_not_there(spec: str, message: str, folder: Path, faults: Check) -> None:
    (folder / "empty.py").write_text("X = 1\n")
    (folder / "broken.py").write_text("\ndef f(:\n")
    (text,) = faults(f"worker.reward.reward_function={spec}")
    assert text.startswith("worker.reward.reward_function: ")
    assert message in text


@pytest.mark.parametrize(
    ("items", "message"),
    [
        (
            [
                "worker.reward.reward_function=null",
                "worker.reward.reward_functions=[reward.py:compute_score, gone.py]",
            ],
            "worker.reward.reward_functions: there is no gone.py",
        ),
        (
            ["worker.reward.reward_functions=[reward.py:compute_score]"],
            "worker.reward.reward_function: ./reward.py:compute_score is set, and reward_functions too; keep one",
        ),
        (
            [
                "worker.reward.reward_function=null",
                "worker.reward.reward_functions=[reward.py:compute_score]",
                "worker.reward.reward_weights=[1, 2]",
            ],
            "worker.reward.reward_weights: has 2 numbers for 1 reward_functions; give one each",
        ),
    ],
)
def test_several_reward_functions(items: list[str], message: str, faults: Check) -> None:
    (text,) = faults(*items)
    assert text.startswith(message)


@pytest.mark.parametrize(
    "source",
    [
        "def main(x): pass",
        "async def main(x): pass",
        "from math import sqrt as main",
        "from math import *",
        "main = print",
        "if True:\n    def main(x): pass\nelse:\n    main = None",
        "try:\n    import main\nexcept ImportError:\n    def main(x): pass",
        "class main:\n    def __call__(self, x): pass",
    ],
)
def test_all_ways_to_bind_the_name_count_and_main_is_the_default(source: str, folder: Path, notices: Check) -> None:
    (folder / "mine.py").write_text(source)
    assert notices("worker.reward.reward_function=./mine.py") == []


def test_the_reward_file_is_not_executed(folder: Path, notices: Check) -> None:
    (folder / "mine.py").write_text("raise SystemExit('executed')\ndef main(x): pass\n")
    assert notices("worker.reward.reward_function=./mine.py") == []


def test_parents_of_a_reward_module_are_not_imported(
    folder: Path, notices: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "score_pack/inner").mkdir(parents=True)
    for name in ("score_pack/__init__.py", "score_pack/inner/__init__.py"):
        (folder / name).write_text("raise SystemExit('imported')\n")
    (folder / "score_pack/inner/score.py").write_text("def f(x): pass\n")
    monkeypatch.syspath_prepend(folder)
    assert notices("worker.reward.reward_function=score_pack.inner.score:f") == []
    assert "score_pack" not in sys.modules


def test_a_port_in_use(faults: Check, notices: Check) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        (text,) = faults(f"worker.rollout.port={port}")
        assert text == (
            f"worker.rollout.port: {port} is in use on this machine; stop what uses it, or write null for a free one"
        )
        assert notices(f"worker.rollout.port={port}", check_port=False) == []
        (notice,) = notices(f"worker.rollout.port={port}", "worker.rollout.name=transformers")
        assert notice.startswith("worker.rollout.port: no effect")
    assert notices(f"worker.rollout.port={port}") == []


def test_checking_leaves_nothing_behind(folder: Path, notices: Check) -> None:
    before = sorted(folder.rglob("*"))
    notices("trainer.save_checkpoint_path=runs/new")
    assert sorted(folder.rglob("*")) == before
