"""Reading: layers, types, and every unknown key and wrong type in one message."""

import subprocess
import sys
from pathlib import Path

import pytest

from grpo_vlm.config import Config, load_config, run_folder, sampling_values, to_yaml, tokenizer_path, updates_per_step
from grpo_vlm.config.load import nearest_key
from grpo_vlm.errors import ConfigError


def write(folder: Path, text: str) -> Path:
    path = folder / "config.yaml"
    path.write_text(text)
    return path


def refusal(*args, **kwargs) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(*args, **kwargs)
    return str(caught.value)


def test_without_sources_the_defaults_hold() -> None:
    assert load_config() == Config()


def test_later_layers_win_and_leave_their_neighbours_alone(tmp_path: Path) -> None:
    path = write(tmp_path, "data: {seed: 2, max_pixels: 500000}\nworker: {actor: {optim: {lr: 2e-6}}}\n")
    base = {"data": {"seed": 1000, "min_pixels": 7}, "trainer.experiment_name": "x"}
    config = load_config(path, ["data.seed=3", "worker.actor.optim.weight_decay=0"], base)
    assert (config.data.seed, config.data.max_pixels, config.data.min_pixels) == (3, 500000, 7)
    assert (config.worker.actor.optim.lr, config.worker.actor.optim.weight_decay) == (2e-6, 0.0)
    assert config.trainer.experiment_name == "x"


@pytest.mark.parametrize(
    ("item", "section", "name", "value"),
    [
        ("worker.actor.optim.lr=1e-6", "actor.optim", "lr", 1e-6),
        ("worker.actor.optim.lr=1", "actor.optim", "lr", 1.0),
        ("worker.actor.optim.betas=[0.9, 0.95]", "actor.optim", "betas", [0.9, 0.95]),
        ("worker.actor.padding_free=False", "actor", "padding_free", False),
        ("worker.actor.model.model_path=org/name", "actor.model", "model_path", "org/name"),
        ("worker.actor.model.tokenizer_path=null", "actor.model", "tokenizer_path", None),
        ("worker.reward.reward_function=./a=b.py:f", "reward", "reward_function", "./a=b.py:f"),
        ("worker.reward.reward_function_kwargs.weight=0.5", "reward", "reward_function_kwargs", {"weight": 0.5}),
        ("worker.rollout.val_override_config={n: 4}", "rollout", "val_override_config", {"n": 4}),
        ("worker.rollout.n='8'", "rollout", "n", 8),
        ("worker.actor={ppo_epochs: 2}", "actor", "ppo_epochs", 2),
    ],
)
def test_values_of_overrides_are_yaml_and_become_their_types(
    item: str, section: str, name: str, value: object
) -> None:
    found = load_config(None, [item]).worker
    for part in section.split("."):
        found = getattr(found, part)
    assert getattr(found, name) == value
    assert type(getattr(found, name)) is type(value)


def test_a_number_is_a_name_too() -> None:
    assert load_config(None, ["trainer.experiment_name=2024"]).trainer.experiment_name == "2024"


def test_nested_and_dotted_keys_of_a_base_dict_merge_in_either_order() -> None:
    one = load_config(base={"data.seed": 3, "data": {"shuffle": False}, "worker.actor": {"ppo_epochs": 2}})
    other = load_config(base={"data": {"shuffle": False}, "worker": {"actor": {"ppo_epochs": 2}}, "data.seed": 3})
    assert one == other
    assert (one.data.seed, one.data.shuffle, one.worker.actor.ppo_epochs) == (3, False, 2)


def test_paths_and_tuples_are_welcome_in_a_base_dict(tmp_path: Path) -> None:
    config = load_config(base={"data.train_files": tmp_path / "a.parquet", "worker.actor.optim.betas": (0.9, 0.95)})
    assert config.data.train_files == str(tmp_path / "a.parquet")
    assert config.worker.actor.optim.betas == [0.9, 0.95]


def test_interpolation_reads_other_keys_and_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUN_N", "6")
    items = ["trainer.experiment_name=n${worker.rollout.n}", "worker.rollout.n=${oc.env:RUN_N}"]
    config = load_config(None, items)
    assert (config.worker.rollout.n, config.trainer.experiment_name) == (6, "n6")


def test_interpolated_values_are_typed_too() -> None:
    assert "data.seed: is 'easy_r1' (str); expected int" in refusal(None, ["data.seed=${trainer.project_name}"])
    assert "data.seed: Interpolation key 'data.nope' not found" in refusal(None, ["data.seed=${data.nope}"])


def test_an_empty_section_is_no_fault(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, "worker:\n  actor:\n  rollout:\n    n: 3\n")).worker.rollout.n == 3


def test_all_faults_of_all_sources_are_numbered_in_one_message(tmp_path: Path) -> None:
    path = write(tmp_path, "data:\n  rollout_batchsize: 4\n  seed: many\ntrainner: {}\nworker: {actor: 3}\n")
    text = refusal(path, ["trainer.n_nods=2", "data.shuffle=maybe", "data.train_files"])
    assert text.splitlines() == [
        "The configuration has 7 faults:",
        f"  1. data.rollout_batchsize ({path}): unknown key; did you mean data.rollout_batch_size?",
        f"  2. data.seed ({path}): is 'many' (str); expected int",
        f"  3. trainner ({path}): unknown key; did you mean trainer?",
        f"  4. worker.actor ({path}): is a section and cannot be 3; set the keys below it",
        "  5. trainer.n_nods (command line): unknown key; did you mean trainer.nnodes?",
        "  6. data.shuffle (command line): is 'maybe' (str); expected bool",
        "  7. data.train_files (command line): is not of the form key=value; write e.g. data.train_files=VALUE",
    ]


@pytest.mark.parametrize(
    ("unknown", "nearest"),
    [
        ("data.rollout_batchsize", "data.rollout_batch_size"),
        ("actor.global_batch_size", "worker.actor.global_batch_size"),
        ("worker.actor.lr", "worker.actor.optim.lr"),
        ("worker.actor.optimizer.lr", "worker.actor.optim.lr"),
        ("worker.actor.ulysses_siz", "worker.actor.ulysses_size"),
        ("wroker", "worker"),
        ("qqq", ""),
    ],
)
def test_the_nearest_valid_key(unknown: str, nearest: str) -> None:
    assert nearest_key(unknown) == nearest


def test_a_key_with_no_neighbour_points_to_help() -> None:
    assert "qqq (command line): unknown key; `python train.py --help` lists every key" in refusal(None, ["qqq=1"])


@pytest.mark.parametrize("plus", ["+", "++"])
def test_hydras_way_to_add_a_key(plus: str) -> None:
    assert load_config(None, [f"{plus}data.seed=3"]).data.seed == 3


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ("data.seed=1.5", "is 1.5 (float); expected int"),
        ("data.seed=true", "is True (bool); expected int"),
        ("data.seed=", "is null; expected int (default 1)"),
        ("data.seed=[1]", "is [1] (list); expected int"),
        ("data.seed={a: 1}", "is {'a': 1} (a section); expected int"),
        ("data.seed=???", "is '???' (str); expected int"),
        ("data.shuffle=1", "is 1 (int); expected bool"),
        ("trainer.project_name=???", "is '???' (str); expected str"),
        ("trainer.project_name=yes", "is True (bool); expected str (put quotes around it if the word is meant)"),
        ("data.train_files=[a,b]", "is ['a', 'b'] (list); expected str (one value, no list)"),
        ("worker.actor.optim.lr=fast", "is 'fast' (str); expected float"),
        ("worker.actor.optim.betas=[0.9,x]", "is [0.9, 'x'] (list); expected list[float]"),
        ("trainer.logger=console", "is 'console' (str); expected list[str], e.g. [console]"),
        ("trainer.max_steps=soon", "is 'soon' (str); expected int or null"),
        ("worker.rollout.val_override_config=3", "is 3 (int); expected dict"),
    ],
)
def test_a_wrong_type_is_named_with_the_value_seen(item: str, message: str) -> None:
    key = item.partition("=")[0]
    assert f"  1. {key} (command line): {message}" in refusal(None, [item]).splitlines()


def test_a_dict_of_objects_is_refused() -> None:
    text = refusal(base={"worker.reward.reward_function_kwargs": {"f": print}})
    assert "worker.reward.reward_function_kwargs: is" in text
    assert "of values that YAML can hold" in text


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ("--data.seed=3", "--data.seed=3 (command line): is not of the form key=value; write e.g. data.seed=3"),
        ("~data.seed=3", "~data.seed=3 (command line): is not of the form key=value; write e.g. data.seed=3"),
        ("data..seed=3", "is not of the form key=value"),
        ("data.seed={", "data.seed={ (command line): the value is not YAML, quotes may help"),
    ],
)
def test_malformed_overrides(item: str, message: str) -> None:
    assert message in refusal(None, [item])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a\n- b\n", "is a list; expected sections such as data:"),
        ("data: [1\n", "is not a YAML file: while parsing"),
        ("data: {seed: 1}\ndata: {seed: 2}\n", "found duplicate key data"),
    ],
)
def test_a_file_that_is_no_configuration(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, text)
    found = refusal(path)
    assert f"--config {path}" in found
    assert message in found


def test_an_absent_file() -> None:
    assert "--config no/such.yaml: there is no such file" in refusal("no/such.yaml")


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, "")) == Config()


def test_to_yaml_reads_back_to_an_equal_config(tmp_path: Path) -> None:
    items = ["worker.actor.optim.lr=3.3e-7", "trainer.experiment_name='on'", "data.system_prompt='a: b'"]
    items += ["worker.reward.reward_function_kwargs={a: [1, 2.5, null]}", "trainer.logger=[file]"]
    config = load_config(None, items)
    assert load_config(write(tmp_path, to_yaml(config))) == config
    assert load_config(None, items).worker.actor.optim.lr == 3.3e-7


def test_to_yaml_hides_secrets_of_the_reward_function_when_asked(tmp_path: Path) -> None:
    given = {
        "API_Key": "s3cret",
        "judge": {"password": "s3cret", "url": "http://judge", "tokens": 5, "credentials": {"user": "s3cret"}},
        "urls": [{"access_token": "s3cret", "name": "a"}],
        "client_secret": ["s3cret", None],
        "weight": 0.5,
    }
    config = load_config(None, base={"worker.reward.reward_function_kwargs": given, "trainer.project_name": "key"})
    text = to_yaml(config, redact=True)
    assert "s3cret" not in text and to_yaml(config).count("s3cret") == 5
    read = load_config(write(tmp_path, text))
    hidden = "[redacted]"
    assert read.worker.reward.reward_function_kwargs == {
        "API_Key": hidden,
        "judge": {"password": hidden, "url": "http://judge", "tokens": 5, "credentials": {"user": hidden}},
        "urls": [{"access_token": hidden, "name": "a"}],
        "client_secret": [hidden, None],
        "weight": 0.5,
    }
    assert read.trainer.project_name == "key" and config.worker.reward.reward_function_kwargs == given


def test_derived_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_config(
        None, ["worker.actor.model.model_path=m", "worker.rollout.val_override_config={n: 4, top_p: 0.9}"]
    )
    config.worker.actor.ppo_epochs = 3
    assert updates_per_step(config) == 512 // 256 * 3
    assert run_folder(config) == tmp_path / "checkpoints/easy_r1/demo"
    assert tokenizer_path(config) == "m"
    train = {"n": 1, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
    train |= {"max_tokens": 512, "stop": ()}
    assert sampling_values(config, validation=False) == train
    assert sampling_values(config, validation=True) == train | {"n": 4, "top_p": 0.9}
    config.trainer.save_checkpoint_path = "runs/a"
    assert run_folder(config) == tmp_path / "runs/a"


def test_importing_and_checking_imports_nothing_heavy() -> None:
    code = """
import sys
from grpo_vlm.config import load_and_check
from grpo_vlm.config.help import format_help
from grpo_vlm.errors import ConfigError
format_help()
try:
    load_and_check(None, ["worker.reward.reward_function=json:loads"])
except ConfigError as error:
    assert "data.train_files" in str(error) and "reward_function" not in str(error), error
else:
    raise SystemExit("no fault found")
print(sorted({"torch", "transformers", "trl", "datasets", "vllm", "accelerate", "numpy", "PIL"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr
