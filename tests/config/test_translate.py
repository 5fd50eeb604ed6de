"""EasyR1's and verl's command lines run as they are: every key is translated, or listed with a reason."""

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

import train
from grpo_vlm.cli import main
from grpo_vlm.config import Config, load_and_check
from grpo_vlm.config.check import get
from grpo_vlm.config.dialect_easyr1 import DROPPED, RENAMED
from grpo_vlm.config.dialect_verl import ENVIRONMENT
from grpo_vlm.config.dialect_verl_keys import KEYS, rule_of
from grpo_vlm.config.keys import schema_options
from grpo_vlm.config.load import read_config
from grpo_vlm.config.reward_sources import BY_DATA_SOURCE, SOURCES, check_sources, reward_for
from grpo_vlm.config.trackers import not_installed
from grpo_vlm.config.translate import translate
from grpo_vlm.data.prepare import RECIPES
from grpo_vlm.errors import ConfigError
from grpo_vlm.rewards.by_source import compute_score
from tests.config.command_lines import EASYR1, EASYR1_CONFIG, VERL

ROOT = Path(__file__).parents[2]
A, R = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
SMALLEST = ["actor_rollout_ref.model.path=model", "data.train_files=train.parquet", "algorithm.adv_estimator=grpo"]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with EasyR1's example configuration, our rewards and templates, and rows for verl."""
    monkeypatch.chdir(tmp_path)
    for name in (*ENVIRONMENT, "SWANLAB_MODE", "SWANLAB_LOG_DIR"):
        monkeypatch.delenv(name, raising=False)
    for name in ("configs", "rewards"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples/config.yaml").write_text(yaml.safe_dump(EASYR1_CONFIG))
    (tmp_path / "data/geo3k").mkdir(parents=True)
    for name in ("train.parquet", "data/geo3k/train.parquet", "data/geo3k/test.parquet"):
        (tmp_path / name).touch()
    return tmp_path


def flat(tree: dict, prefix: str = "") -> dict:
    """Dotted keys; the dicts that options hold are values."""
    found = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        option = schema_options().get(key)
        if isinstance(value, dict) and (option is None or option.kind != "dict"):
            found |= flat(value, f"{key}.")
        else:
            found[key] = value
    return found


def pairs(command: str) -> dict[str, object]:
    """Keys and YAML values of a command line, the last of each."""
    items = dict(item.lstrip("+").split("=", 1) for item in command.split())
    return {key: yaml.safe_load(value) for key, value in items.items()}


def number(value: object) -> object:
    """PyYAML reads 1e-6 as text."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


# --- EasyR1 ---


@pytest.mark.parametrize("name", EASYR1)
def test_every_key_of_easyr1s_command_lines_arrives_or_is_listed(name: str, place: Path) -> None:
    given = flat(EASYR1_CONFIG) | pairs(EASYR1[name])
    assert given.pop("config") == "examples/config.yaml"
    config, faults, notices = read_config(None, EASYR1[name].split())
    assert faults == []
    told = "\n".join(notices)
    if "trainer.n_nodes" in given:
        del given["trainer.nnodes"]  # the file's, which the older name replaces
    for key, value in given.items():
        if key in DROPPED:
            assert f"{key} is left out: " in told
        elif key in RENAMED:
            assert f"{key} is read as {RENAMED[key]}" in told and get(config, RENAMED[key]) == value
        elif key == "trainer.logger":
            gone = not_installed(value)
            assert config.trainer.logger == [name for name in value if name not in gone]
            assert all(f"trainer.logger: {name} is left out: it is not installed" in told for name in gone)
        elif str(value).startswith("./examples/"):
            assert f"{key}: {value.partition(':')[0]} is not here; " in told and Path(get(config, key).split(":")[0])
        else:
            assert get(config, key) == number(value), key
    assert len(notices) == len(set(notices))


def test_easyr1s_command_line_runs_unmodified(place: Path) -> None:
    """The first documented command line, checked as on the eight GPUs that it asks for."""
    items = EASYR1["qwen2_5_vl_7b_geo3k_grpo"].split()
    config, notices = load_and_check(None, items, world_size=8, check_port=False)
    assert config.worker.reward.reward_function == "./rewards/geo3k.py:compute_score"
    assert config.data.format_prompt == "./configs/prompts/math.jinja"
    neutral = [line for line in notices if "has no effect in this version" in line]
    assert [line.split(" = ")[0] for line in neutral] == [
        "worker.actor.micro_batch_size_per_device_for_experience",
        "worker.ref.fsdp.enable_cpu_offload",
    ]


def test_a_file_of_easyr1s_that_is_there_stays(place: Path) -> None:
    (place / "examples/format_prompt").mkdir()
    (place / "examples/format_prompt/math.jinja").write_text("{{ content }}")
    config, _, notices = read_config(None, ["config=examples/config.yaml"])
    assert config.data.format_prompt == "./examples/format_prompt/math.jinja"
    assert not [line for line in notices if "math.jinja" in line]


# --- verl ---


def test_every_rule_names_a_key_of_ours_that_exists() -> None:
    assert [rule.to for rule in KEYS.values() if rule.to and rule.to not in schema_options()] == [
        "worker.rollout.engine_kwargs.max_num_seqs",
        "worker.rollout.engine_kwargs.enable_prefix_caching",
    ]
    assert all(rule.to or rule.reason or rule.together for rule in KEYS.values())


@pytest.mark.parametrize("name", VERL)
def test_verls_scripts_translate_without_loss(name: str, place: Path) -> None:
    given = pairs(VERL[name])
    assert len(given) >= 35
    config, faults, notices = read_config(None, VERL[name].split())
    assert faults == []
    for key, value in given.items():
        if key.startswith(f"{R}engine_kwargs"):
            assert config.worker.rollout.engine_kwargs == {"mm_processor_cache_gb": 0}
            continue
        lines = [line for line in notices if line.startswith("verl: ") and f"{key}=" in line.partition(" -> ")[0]]
        assert lines, f"{key} is neither translated nor listed"
        rule = rule_of(key)
        if rule.to and not rule.together:
            wanted = rule.values.get(value, value) if rule.values else value
            assert get(config, rule.to) == number(wanted), key
        assert all(" -> " in line or len(line.partition(" is left out: ")[2]) > 10 for line in lines)


@pytest.mark.parametrize("name", VERL)
def test_verls_scripts_pass_every_check(name: str, place: Path) -> None:
    config, notices = load_and_check(
        None, VERL[name].split(), world_size=16 if "on npu" in name and "qwen2_5" in name else 8, check_port=False
    )
    actor, rollout = config.worker.actor, config.worker.rollout
    assert (config.data.rollout_batch_size, actor.global_batch_size, rollout.n) == (512, 128, 5)
    assert (config.data.max_prompt_length, config.data.max_response_length) == (1024, 2048)
    assert (actor.dynamic_batching, actor.max_token_len_per_gpu, actor.padding_free) == (True, 24576, True)
    assert (actor.clip_ratio_low, actor.clip_ratio_high, actor.clip_ratio_dual) == (0.2, 0.2, 3.0)  # verl's defaults
    assert (config.algorithm.disable_kl, config.algorithm.use_kl_loss) == (False, True)
    assert (config.algorithm.kl_coef, config.algorithm.kl_penalty) == (0.01, "low_var_kl")
    assert (rollout.tensor_parallel_size, rollout.name) == (2, "vllm")
    assert rollout.val_override_config == {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "n": 1}  # greedy
    assert config.worker.reward.reward_function == BY_DATA_SOURCE
    trainer = config.trainer
    assert (trainer.save_freq, trainer.val_freq, trainer.total_epochs) == (20, 5, 15)
    assert ("accelerate_configs" in "\n".join(notices)) and ("megatron" not in name or "no Megatron" in str(notices))


def verl(*items: str) -> tuple[Config, str]:
    """A small verl command line with these items: the configuration and its notices."""
    config, faults, notices = read_config(None, [*SMALLEST, *items])
    assert faults == []
    return config, "\n".join(notices)


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ((), {"data.rollout_batch_size": 1024, "worker.actor.global_batch_size": 256, "trainer.total_epochs": 30}),
        (
            (),
            {"algorithm.disable_kl": True, "worker.actor.clip_ratio_high": 0.2, "data.filter_overlong_prompts": False},
        ),
        ((), {"worker.actor.dynamic_batching": False, "worker.actor.max_token_len_per_gpu": None}),
        ((f"{A}use_dynamic_bsz=True",), {"worker.actor.max_token_len_per_gpu": 16384}),
        ((f"{A}ppo_micro_batch_size_per_gpu=2",), {"worker.actor.micro_batch_size_per_device_for_update": 2}),
        ((f"{A}clip_ratio=0.1",), {"worker.actor.clip_ratio_low": 0.2, "worker.actor.clip_ratio_high": 0.2}),
        (
            (f"{A}clip_ratio_low=0.1", f"{A}clip_ratio_high=0.28"),
            {"worker.actor.clip_ratio_low": 0.1, "worker.actor.clip_ratio_high": 0.28},
        ),
        (
            ("algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.kl_coef=0.02"),
            {"algorithm.disable_kl": False, "algorithm.use_kl_loss": False, "algorithm.kl_coef": 0.02},
        ),
        ((f"{A}use_kl_loss=True",), {"algorithm.kl_coef": 0.001, "algorithm.kl_penalty": "low_var_kl"}),
        (
            (f"{R}val_kwargs.do_sample=True", f"{R}val_kwargs.temperature=0.6", f"{R}val_kwargs.n=4"),
            {"worker.rollout.val_override_config": {"temperature": 0.6, "top_p": 1.0, "top_k": -1, "n": 4}},
        ),
        (
            ("actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.model.target_modules=[q_proj,v_proj]"),
            {
                "worker.actor.model.lora.rank": 8,
                "worker.actor.model.lora.alpha": 16,
                "worker.actor.model.lora.target_modules": "q_proj,v_proj",
            },
        ),
        ((f"{A}optim.lr_warmup_steps=-1",), {"worker.actor.optim.lr_warmup_steps": None}),
        ((f"{A}checkpoint.save_contents=[model]",), {"trainer.save_model_only": True}),
        (("trainer.resume_mode=disable",), {"trainer.find_last_checkpoint": False}),
        (
            ("trainer.resume_mode=resume_path", "trainer.resume_from_path=a/global_step_3"),
            {"trainer.load_checkpoint_path": "a/global_step_3"},
        ),
        (("data.train_files=[a.parquet,b.parquet]",), {"data.train_files": "a.parquet,b.parquet"}),
        (("data.mm_processor_kwargs={max_pixels: 50176}",), {"data.min_pixels": 3136, "data.max_pixels": 50176}),
        (("data.num_workers=2", "worker.rollout.stop=[x]"), {"data.num_workers": 2, "worker.rollout.stop": ["x"]}),
        ((f"{R}max_num_seqs=64",), {"worker.rollout.engine_kwargs": {"max_num_seqs": 64}}),
        (
            (
                "custom_reward_function.path=my.py",
                "custom_reward_function.name=score",
                "+custom_reward_function.reward_kwargs.weight=0.5",
            ),
            {
                "worker.reward.reward_function": "my.py:score",
                "worker.reward.reward_function_kwargs": {"weight": 0.5},
            },
        ),
        (("++custom_reward_function.path=my.py",), {"worker.reward.reward_function": "my.py:compute_score"}),
        ((f"{A}loss_agg_mode=seq-mean-token-sum-norm",), {"worker.actor.loss_avg_mode": "seq-mean-token-sum-norm"}),
        (
            (f"{A}policy_loss.loss_mode=gspo", f"{A}clip_ratio_low=3e-4", f"{A}loss_agg_mode=token-mean"),
            {
                "worker.actor.loss_type": "gspo_token",
                "worker.actor.loss_avg_mode": "seq-mean-token-mean",
                "worker.actor.penalty_avg_mode": None,
                "worker.actor.clip_ratio_low": 3e-4,
            },
        ),
        (
            (f"{A}policy_loss.loss_mode=sapo", f"{A}use_kl_loss=True", f"{A}clip_ratio=0.1", f"{A}clip_ratio_c=5"),
            {
                "worker.actor.loss_avg_mode": "seq-mean-token-mean",
                "worker.actor.penalty_avg_mode": "token",  # verl's default loss_agg_mode
                "worker.actor.clip_ratio_low": 0.2,
            },
        ),
    ],
)
def test_what_verls_options_mean(items: tuple[str, ...], expected: dict, place: Path) -> None:
    config, _ = verl(*items)
    assert {key: get(config, key) for key in expected} == expected


@pytest.mark.parametrize(
    ("item", "answer"),
    [
        (f"{R}name=sglang", "is left out: the generation engine here is vLLM"),
        (f"{R}name=trtllm", "is left out: the generation engine here is vLLM"),
        (f"{R}engine_kwargs.sglang.attention_backend=fa3", "there is no SGLang"),
        ("model_engine=megatron", "accelerate_configs/ file (fsdp2, zero2, zero3)"),
        (f"{A}megatron.context_parallel_size=2", "accelerate_configs/ file (fsdp2, zero2, zero3)"),
        (f"{A}strategy=megatron", "accelerate_configs/ decides how the trainer shards"),
        ("trainer.device=npu", "needs vllm-ascend"),
        (f"{A}fsdp_config.ulysses_sequence_parallel_size=4", "sequences are not split over devices here"),
        ("ray_kwargs.ray_init.num_cpus=8", "there is no Ray here"),
        ("trainer.logger=[console,rl_insight]", "is left out: rl_insight: not written to"),
    ],
)
def test_what_has_no_counterpart_is_answered_with_what_is_here(item: str, answer: str, place: Path) -> None:
    assert answer in verl(item)[1]


@pytest.mark.parametrize(
    ("item", "answer"),
    [
        ("data.truncation=left", "data.truncation: left is not available here: a cut prompt loses image tokens"),
        (f"{A}policy_loss.loss_mode=dro", "'dro' is not here; available: vanilla, gspo"),
        (f"{A}loss_agg_mode=token-sum", "'token-sum' is not here"),
        (f"{R}multi_turn.enable=True", "answers are one turn here"),
        ("reward_model.enable=True", "no reward model in this version"),
        ("reward_model.reward_manager=dapo", "take ./rewards/dapo.py:compute_score"),
        (f"{A}ppo_micro_batch_size=8", "write ppo_micro_batch_size_per_gpu"),
        (f"{A}optim.num_cycles=1.5", "the cosine is half a wave"),
        (f"{A}policy_loss.new_number=1", "policy_loss.new_number: 1 is not available here: no part of this package"),
        (f"{A}ppo_mini_batchsize=8", "did you mean actor_rollout_ref.actor.ppo_mini_batch_size?"),
        ("algorithm.adv_estimatr=grpo", "did you mean algorithm.adv_estimator?"),
        (f"{R}gpu_memory_utilization=much", "(from actor_rollout_ref.rollout.gpu_memory_utilization): is 'much'"),
    ],
)
def test_what_would_change_a_result_is_refused(item: str, answer: str, place: Path) -> None:
    _, faults, _ = read_config(None, [*SMALLEST, item])
    assert len(faults) == 1 and answer in faults[0].message


def test_two_kl_terms_are_refused(place: Path) -> None:
    _, faults, _ = read_config(None, [*SMALLEST, f"{A}use_kl_loss=True", "algorithm.use_kl_in_reward=True"])
    assert "in the loss or in the reward, not in both" in faults[0].message


def test_verls_environment_stands_in_for_what_is_not_named(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"MODEL_PATH": "other", "TRAIN_FILE": "t.parquet", "TEST_FILE": "v.parquet", "INFER_BACKEND": "trtllm"}
    for name, value in (values | {"SP_SIZE": "4"}).items():
        monkeypatch.setenv(name, value)
    config, notices = verl()
    assert config.worker.actor.model.model_path == "model"  # it is named
    assert (config.data.train_files, config.data.val_files) == ("train.parquet", "v.parquet")
    assert f"{R}name=trtllm is left out" in notices and "ulysses_sequence_parallel_size=4 is left out" in notices
    assert read_config(None, [])[0].worker.actor.model.model_path is None  # no verl command line, no environment


def test_a_verl_file_and_interpolations(place: Path) -> None:
    text = "actor_rollout_ref: {rollout: {name: '???', n: 3}, actor: {optim: {_target_: x}}}\n"
    text += "trainer: {project_name: p, default_local_dir: 'runs/${trainer.project_name}'}\n"
    (place / "verl.yaml").write_text(text)
    config, faults, _ = read_config("verl.yaml", ["algorithm.adv_estimator=grpo", f"{R}n=4"])
    assert faults == []
    assert (config.worker.rollout.n, config.trainer.save_checkpoint_path) == (4, "runs/p")


# --- the reward by data source ---


def test_data_sources_and_unknown_ones() -> None:
    assert reward_for("hiyouga/geometry3k").function == "./rewards/geo3k.py:compute_score"
    for recipe in RECIPES.values():  # what `grpo-vlm prepare` writes is known
        assert recipe.TASK.data_source in SOURCES
    for source in SOURCES.values():
        assert (ROOT / source.function.partition(":")[0]).is_file()
    with pytest.raises(ConfigError, match=r"data_source 'a', 'b': no reward is known.*hiyouga/geometry3k"):
        check_sources(["hiyouga/geometry3k", "b", "a"])


def test_each_sample_is_scored_by_its_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    right = r"<think>a</think>\boxed{3}"
    items = [
        {
            "response": text,
            "response_length": 9,
            "ground_truth": "3",
            "prompt_text": "",
            "columns": {"data_source": source},
        }
        for text, source in (
            (right, "hiyouga/geometry3k"),
            (r"\boxed{3}", "lighteval/MATH"),
            (r"\boxed{4}", "lighteval/MATH"),
        )
    ]
    assert [score["overall"] for score in compute_score(items)] == pytest.approx([1.0, 1.0, 0.0])
    with pytest.raises(ConfigError, match="no reward is known"):
        compute_score([{**items[0], "columns": {}}])
    check_sources(item["columns"]["data_source"] for item in items)
    with pytest.raises(ConfigError, match="data_source 'None', 'x': no reward is known"):
        check_sources(iter(["x", None]))


# --- the commands ---


@pytest.mark.parametrize("command", [EASYR1["qwen2_5_vl_7b_geo3k_grpo"], VERL["qwen3_vl_8b_fsdp"]])
def test_translate_prints_yaml_that_reads_back_to_the_same(
    command: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["translate", "python3", "-m", "verl.trainer.main_ppo", *command.split()]) == 0
    printed = capsys.readouterr().out
    (place / "ours.yaml").write_text(printed)
    again, faults, notices = read_config("ours.yaml")
    assert (again, faults, notices) == (read_config(None, command.split())[0], [], [])
    assert "# " in printed and "actor_rollout_ref" not in yaml.safe_dump(yaml.safe_load(printed))


def test_translate_a_file_and_what_it_refuses(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["translate", "examples/config.yaml"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["data"]["rollout_batch_size"] == 512
    assert main(["translate", *SMALLEST, "data.truncation=left", f"{A}foo=1"]) == 2
    assert "2 faults" in capsys.readouterr().err
    assert main(["translate"]) == 2


def test_train_takes_hydras_file_names(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main(["--config-path=config", "--config-name=ppo_megatron_trainer.yaml", f"{A}nonsense=1"]) == 2
    error = capsys.readouterr().err
    assert f"{A}nonsense" in error and "config_name" not in error


def read(run: Callable[[], Config]) -> str:
    with pytest.raises(ConfigError) as caught:
        run()
    return str(caught.value)


def test_a_variant_names_its_base(place: Path) -> None:
    (place / "variants").mkdir()
    (place / "all.yaml").write_text("data: {seed: 2, rollout_batch_size: 8}\ntrainer: {experiment_name: all}\n")
    (place / "variants/one.yaml").write_text("base: ../all.yaml\ndata: {seed: 3}\n")
    (place / "variants/two.yaml").write_text("base: one.yaml\ntrainer: {experiment_name: two}\n")
    config, faults, _ = read_config("variants/two.yaml", ["data.shuffle=false"])
    assert faults == []
    assert (config.data.seed, config.data.rollout_batch_size, config.data.shuffle) == (3, 8, False)
    assert config.trainer.experiment_name == "two"
    (place / "loop.yaml").write_text("base: loop.yaml\n")
    assert "is its own base" in read(lambda: read_config("loop.yaml"))
    (place / "lost.yaml").write_text("base: no.yaml\n")
    assert "base: no.yaml (in lost.yaml): there is no such file" in read(lambda: read_config("lost.yaml"))


def test_hydras_own_arguments_are_passed_over_and_a_deletion_is_refused() -> None:
    items = ["actor_rollout_ref.rollout.n=4", "algorithm.adv_estimator=grpo"]
    text = translate(["--config-path=config", "--config-name=ppo_trainer.yaml", *items])
    assert yaml.safe_load(text)["worker"]["rollout"]["n"] == 4
    with pytest.raises(ConfigError, match=r"~data.seed .* is not of the form key=value"):
        translate([*items, "~data.seed"])
