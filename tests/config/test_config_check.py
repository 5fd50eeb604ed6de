"""Single keys: states, choices, ranges; rules between keys; the launcher; all faults at once; notices."""

from collections.abc import Callable
from pathlib import Path

import pytest

from grpo_vlm.config import Config, check_config, load_and_check, load_config
from grpo_vlm.config.check import get
from grpo_vlm.config.load import schema_options
from grpo_vlm.config.options import NEUTRAL, PLANNED
from grpo_vlm.errors import ConfigError

Check = Callable[..., list[str]]


def other_value(default: object, kind: str) -> str:
    """A value of the same type that is not the default."""
    if kind == "bool":
        return str(not default).lower()
    if kind in ("int", "float"):
        return str((default or 1) + 1)
    return {"list[float]": "[0.5, 0.5]", "dict": "{a: 1}"}.get(kind, "other")


PLANNED_KEYS = [key for key, option in schema_options().items() if option.status == PLANNED]
NEUTRAL_KEYS = [key for key, option in schema_options().items() if option.status == NEUTRAL]


def test_a_sound_configuration_gives_no_notice(notices: Check) -> None:
    assert notices() == []
    assert notices(world_size=8, num_nodes=2, gpus_per_node=4) == []


@pytest.mark.parametrize("key", PLANNED_KEYS)
def test_a_planned_key_is_refused_with_its_reason_and_accepted_with_its_default(
    key: str, faults: Check, notices: Check
) -> None:
    option = schema_options()[key]
    (text,) = faults(f"{key}={other_value(option.default, option.kind)}")
    assert text.startswith(f"{key}: ")
    assert f"is not available in this version: {option.reason}. Remove the key or write " in text
    default = "''" if option.default == "" else "null" if option.default is None else option.default
    assert notices(f"{key}={default}") == []


@pytest.mark.parametrize("key", NEUTRAL_KEYS)
def test_a_neutral_key_is_accepted_and_a_notice_says_that_it_does_nothing(key: str, notices: Check) -> None:
    option = schema_options()[key]
    (text,) = notices(f"{key}={other_value(option.default, option.kind)}")
    assert text.startswith(f"{key} = ")
    assert text.endswith(f"has no effect in this version: {option.reason}")


def test_the_keys_that_do_not_work_yet_are_the_known_ones() -> None:
    sections = ("worker.ref.", "worker.critic.", "worker.actor.offload.", "worker.actor.fsdp.")
    assert [key for key in NEUTRAL_KEYS if not key.startswith(sections)] == [
        "worker.actor.micro_batch_size_per_device_for_experience",
        "worker.rollout.disable_tqdm",
        "worker.reward.num_cpus",
        "algorithm.lam",
        "trainer.critic_warmup",
        "trainer.ray_timeline",
    ]
    assert PLANNED_KEYS == ["worker.actor.ulysses_size"]


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ("algorithm.adv_estimator=gae", "gae is not available in this version: needs a value model"),
        ("algorithm.adv_estimator=gpro", "gpro is not a valid value (did you mean grpo?). Valid: grpo"),
        ("algorithm.kl_penalty=fulll", "fulll is not a valid value (did you mean full?). Valid: kl, abs, mse"),
        ("worker.actor.loss_type=gspoo", "gspoo is not a valid value (did you mean gspo?). Valid: default, gspo"),
        ("worker.actor.loss_avg_mode=tokens", "tokens is not a valid value (did you mean token?). Valid: token, seq"),
        ("worker.actor.strategy=ddp", "ddp is not a valid value"),
        ("worker.actor.optim.strategy=sgd", "sgd is not a valid value. Valid: adamw, adamw_bf16"),
        ("worker.actor.optim.lr_scheduler_type=linear", "linear is not a valid value. Valid: constant, cosine"),
        ("worker.actor.fsdp.torch_dtype=fp16", "fp16 is not a valid value"),
        ("worker.actor.fsdp.mp_param_dtype=fp16", "fp16 is not a valid value"),
        ("worker.rollout.name=sglang", "sglang is not available in this version"),
        ("worker.rollout.dtype=int8", "int8 is not a valid value"),
        ("worker.rollout.placement=colocate", "colocate is not a valid value. Valid: shared, dedicated, external"),
        (
            "worker.rollout.lora_sync=merge",
            "merge is not a valid value (did you mean merged?). Valid: merged, adapter",
        ),
        ("worker.hybrid_engine=false", "false is not a valid value. Valid: true"),
        ("trainer.logger=[consol]", "consol is not a valid value (did you mean console?)"),
    ],
)
def test_a_choice_that_is_not_there(item: str, message: str, faults: Check) -> None:
    (text,) = faults(item)
    assert text.startswith(f"{item.partition('=')[0]}: {message}")


@pytest.mark.parametrize(
    "item",
    [
        "algorithm.kl_penalty=mse",
        "worker.actor.fsdp.torch_dtype=float32",
        "worker.actor.fsdp.torch_dtype=bf16",
        "worker.actor.fsdp.mp_param_dtype=float32",
        "worker.actor.loss_avg_mode=seq",
        "worker.actor.clip_ratio_low=0",
        "worker.rollout.name=transformers",
        "worker.rollout.tensor_parallel_size=1",
        "worker.rollout.dtype=bf16",
        "worker.actor.optim.lr_scheduler_type=cosine",
        "trainer.logger=[file]",
        "trainer.nnodes=1",
        "trainer.n_gpus_per_node=1",
        "algorithm.use_kl_loss=true",
        "worker.rollout.val_override_config={temperature: 0.6, top_p: 0.95, top_k: 20, n: 1, max_tokens: 16}",
        "worker.rollout.val_override_config={temperature: 0, n: 1}",
    ],
)
def test_what_works_is_accepted_without_a_notice(item: str, notices: Check) -> None:
    assert notices(item) == []


@pytest.mark.parametrize(
    ("item", "must_be"),
    [
        ("data.rollout_batch_size=0", "at least 1"),
        ("data.max_prompt_length=0", "at least 1"),
        ("data.seed=-1", "at least 0"),
        ("data.video_fps=1e300", "above 0 and at most 1000"),
        ("algorithm.kl_coef=-0.1", "at least 0"),
        ("worker.actor.global_batch_size=0", "at least 1"),
        ("worker.actor.micro_batch_size_per_device_for_update=-2", "at least 1"),
        ("worker.actor.max_grad_norm=0", "greater than 0"),
        ("worker.actor.clip_ratio_low=1.1", "between 0 and 1"),
        ("worker.actor.clip_ratio_high=0", "greater than 0"),
        ("worker.actor.clip_ratio_dual=1", "greater than 1"),
        ("worker.actor.ppo_epochs=0", "at least 1"),
        ("worker.actor.optim.lr=-1e-6", "greater than 0"),
        ("worker.actor.optim.lr_warmup_ratio=1", "at least 0 and below 1"),
        ("worker.actor.optim.min_lr_ratio=1.5", "between 0 and 1"),
        ("worker.rollout.n=0", "at least 1"),
        ("worker.rollout.temperature=0", "greater than 0"),
        ("worker.rollout.top_p=0", "above 0 and at most 1"),
        ("worker.rollout.top_k=0", "-1 or at least 1"),
        ("worker.rollout.gpu_memory_utilization=1.1", "above 0 and at most 1"),
        ("worker.rollout.port=70000", "between 1 and 65535"),
        ("worker.rollout.start_timeout_s=0", "greater than 0"),
        ("worker.rollout.cpu_kv_cache_gb=0", "greater than 0"),
        ("worker.rollout.min_p=1", "at least 0 and below 1"),
        ("worker.rollout.repetition_penalty=0", "greater than 0"),
        ("worker.rollout.tensor_parallel_size=0", "at least 1"),
        ("worker.rollout.data_parallel_size=0", "at least 1"),
        ("worker.rollout.step_timeout_s=0", "greater than 0"),
        ("worker.rollout.max_restarts=-1", "at least 0"),
        ("worker.rollout.sync_check_every=0", "-1 or at least 1"),
        ("worker.rollout.sync_check_tolerance=0", "greater than 0"),
        ("trainer.max_steps=0", "at least 1"),
        ("trainer.save_freq=0", "-1 or at least 1"),
        ("trainer.save_limit=0", "-1 or at least 1"),
    ],
)
def test_a_value_out_of_range(item: str, must_be: str, faults: Check) -> None:
    key, _, value = item.partition("=")
    (text,) = [line for line in faults(item) if "Batch sizes that satisfy" not in line]
    assert text.startswith(f"{key}: {float(value):g} is out of range; it must be {must_be} (default ")


@pytest.mark.parametrize("value", [".nan", ".inf", "-.inf"])
def test_a_number_that_is_none(value: str, faults: Check) -> None:
    (text,) = faults(f"worker.actor.optim.lr={value}")
    assert text.startswith("worker.actor.optim.lr: ") and text.endswith("is not a finite number")


@pytest.mark.parametrize(
    ("items", "message"),
    [
        (["worker.rollout.n=1"], "worker.rollout.n: 1 gives no advantage with algorithm.adv_estimator = grpo"),
        (["worker.actor.optim.betas=[0.9]"], "worker.actor.optim.betas: [0.9] must be two numbers"),
        (["worker.actor.optim.betas=[0.9,1]"], "worker.actor.optim.betas: [0.9, 1] must be two numbers"),
        (
            ["data.min_pixels=10", "data.max_pixels=5"],
            "data.min_pixels: 10 is more than data.max_pixels = 5; lower the first or raise the second",
        ),
        (
            ["data.video_max_pixels=5000"],
            "data.video_min_pixels: 262144 (null: data.min_pixels) is more than data.video_max_pixels = 5000 (null: "
            "data.max_pixels); lower the first or raise the second",
        ),
        (
            ["data.video_min_frames=9", "data.video_max_frames=8"],
            "data.video_min_frames: 9 is more than data.video_max_frames = 8; lower the first or raise the second",
        ),
        (
            ["trainer.max_steps=10", "worker.actor.optim.lr_warmup_steps=10"],
            "worker.actor.optim.lr_warmup_steps: 10 warm-up steps leave none of trainer.max_steps = 10; "
            "set it to at most 9",
        ),
        (["trainer.logger=[]"], "trainer.logger: is empty; write e.g. [console, file]"),
        (["trainer.experiment_name=a/b"], "trainer.experiment_name: 'a/b' cannot name a folder"),
        (["trainer.project_name='..'"], "trainer.project_name: '..' cannot name a folder"),
    ],
)
def test_rules_between_keys(items: list[str], message: str, faults: Check) -> None:
    (text,) = faults(*items)
    assert text.startswith(message)


def test_the_launcher_and_the_configuration_disagree(faults: Check, notices: Check) -> None:
    items = ["trainer.nnodes=2", "trainer.n_gpus_per_node=8"]
    nodes, devices = faults(*items, world_size=4, num_nodes=1)
    assert nodes.startswith(
        "trainer.nnodes: the configuration says 2, but the launcher started 1 machine(s); set it to"
    )
    assert devices.startswith(
        "trainer.n_gpus_per_node: the configuration says 8, but the launcher started 4 process(es) per machine"
    )
    assert notices(*items, world_size=16, num_nodes=2) == []


def test_all_kinds_of_faults_come_in_one_message(faults: Check) -> None:
    lines = faults(
        "data.sead=3",
        "data.shuffle=maybe",
        "data.rollout_batch_size=100",
        "algorithm.adv_estimator=gae",
        "worker.actor.ulysses_size=2",
        "worker.actor.optim.lr=0",
        "worker.actor.model.model_path=./nowhere",
        "worker.reward.reward_function=./reward.py:compute_scores",
        "worker.rollout.max_model_len=10",
    )
    starts = [line.split(":")[0] for line in lines]
    assert starts == [
        "data.sead (command line)",
        "data.shuffle (command line)",
        "worker.actor.ulysses_size",
        "worker.actor.optim.lr",
        "algorithm.adv_estimator",
        "data.rollout_batch_size",
        "worker.rollout.max_model_len",
        "worker.actor.model.model_path",
        "worker.reward.reward_function",
        "Batch sizes that satisfy every rule with 1 process(es)",
    ]


def test_a_faulty_key_causes_no_second_fault_by_its_default(folder: object) -> None:
    items = ["data.train_file=train.parquet", "worker.actor.model.model_pth=model", "worker.rollout.n=many"]
    items += ["worker.reward.reward_function=./reward.py:compute_score"]
    with pytest.raises(ConfigError) as caught:
        load_and_check(None, items)
    assert [line.split(":")[0] for line in str(caught.value).splitlines()[1:]] == [
        "  1. data.train_file (command line)",
        "  2. worker.actor.model.model_pth (command line)",
        "  3. worker.rollout.n (command line)",
    ]


def test_an_unreadable_file_is_the_only_fault() -> None:
    with pytest.raises(ConfigError) as caught:
        load_and_check("no/such.yaml")
    assert str(caught.value).splitlines()[0] == "The configuration has 1 fault:"


def test_a_config_changed_in_place_is_checked_and_put_into_its_types(folder: object) -> None:
    config = load_config(None, ["worker.actor.model.model_path=model"])
    config.worker.rollout.n = "8"
    config.worker.actor.optim.betas = (0.9, 0.95)
    given = {"needs_reward": False, "needs_train_files": False, "has_val_rows": True}
    assert check_config(config, **given) == []
    assert (config.worker.rollout.n, config.worker.actor.optim.betas) == (8, [0.9, 0.95])
    config.worker.rollout.n = "many"
    with pytest.raises(ConfigError, match=r"worker\.rollout\.n: is 'many' \(str\); expected int"):
        check_config(config, **given)


@pytest.mark.parametrize(
    ("items", "start"),
    [
        (
            ["algorithm.disable_kl=true", "algorithm.use_kl_loss=true", "algorithm.kl_type=adaptive"],
            "algorithm.use_kl_loss, kl_type: no effect, algorithm.disable_kl is true",
        ),
        (["algorithm.kl_target=0.2"], "algorithm.kl_horizon and kl_target have no effect"),
        (["algorithm.rollout_is_threshold=3"], "algorithm.rollout_is_mode and its thresholds have no effect"),
        (
            ["algorithm.mask_truncated_completions=true", "algorithm.overlong_filtering=true"],
            "algorithm.mask_truncated_completions has no effect",
        ),
        (["trainer.max_try_make_batch=3"], "trainer.max_try_make_batch has no effect"),
        (["worker.actor.penalty_avg_mode=seq"], "worker.actor.penalty_avg_mode has no effect"),
        (["worker.actor.tau_positive=2"], "worker.actor.tau_positive: no effect with loss_type default"),
        (
            ["worker.actor.loss_type=sapo", "worker.actor.clip_ratio_low=0.1", "worker.actor.clip_ratio_high=0.1"],
            "worker.actor.clip_ratio_low, clip_ratio_high: no effect with loss_type sapo",
        ),
        (
            ["worker.actor.loss_type=cispo", "worker.actor.clip_ratio_dual=null"],
            "worker.actor.clip_ratio_dual: no effect with loss_type cispo",
        ),
        (["worker.actor.kl_cov_coef=2"], "worker.actor.kl_cov_coef: no effect with loss_type default"),
        (
            ["worker.actor.optim.lr_warmup_steps=3", "worker.actor.optim.lr_warmup_ratio=0.1"],
            "worker.actor.optim.lr_warmup_ratio has no effect",
        ),
        (["worker.actor.optim.min_lr_ratio=0.1"], "worker.actor.optim.min_lr_ratio has no effect"),
        *(([item], "trainer.val_before_train has no effect") for item in ("data.val_files=''", "data.val_files=")),
        (["data.val_files=null"], "trainer.val_before_train has no effect"),
        (["trainer.save_model_only=true"], "trainer.save_model_only is true"),
    ],
)
def test_settings_that_surprise_get_a_notice(items: list[str], start: str, notices: Check) -> None:
    (text,) = notices(*items)
    assert text.startswith(start)


@pytest.mark.parametrize("launcher", ["FSDP", "DEEPSPEED"])
def test_full_kl_is_refused_where_a_process_has_parts_of_the_models(
    launcher: str, notices: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert notices("algorithm.kl_penalty=full") == []
    monkeypatch.setenv(f"ACCELERATE_USE_{launcher}", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    with pytest.raises(ConfigError, match=r"kl_penalty: full needs .* the launcher started .* take low_var_kl"):
        notices("algorithm.kl_penalty=full")
    assert not any("kl_penalty: full" in line for line in notices("algorithm.disable_kl=true"))


def test_the_home_directory_is_put_in_once_all_is_sound(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder))
    (folder / "runs/global_step_3").mkdir(parents=True)
    paths = {
        "data.train_files": "train.parquet@train",
        "data.val_files": "val.parquet",
        "data.format_prompt": "prompt.jinja",
        "data.override_chat_template": "prompt.jinja",
        "data.image_dir": "model",
        "worker.actor.model.model_path": "model",
        "worker.actor.model.tokenizer_path": "model",
        "worker.reward.reward_function": "reward.py:compute_score",
        "trainer.save_checkpoint_path": "runs/new",
        "trainer.load_checkpoint_path": "runs/global_step_3",
    }
    (folder / "run.yaml").write_text("worker: {rollout: {n: 8}}\n")
    items = [f"{key}=~/{path}" for key, path in paths.items()]
    config, _ = load_and_check(
        "~/run.yaml", [*items, "data.rollout_batch_size=64", "worker.actor.global_batch_size=32"]
    )
    assert config.worker.rollout.n == 8
    assert {key: get(config, key) for key in paths} == {key: f"{folder}/{path}" for key, path in paths.items()}


def test_the_default_config_lacks_the_required_keys_only() -> None:
    with pytest.raises(ConfigError) as caught:
        check_config(Config())
    assert [line.split(":")[0] for line in str(caught.value).splitlines()[1:]] == [
        "  1. worker.rollout.n",
        "  2. data.train_files",
        "  3. worker.actor.model.model_path",
        "  4. worker.reward.reward_function",
    ]
