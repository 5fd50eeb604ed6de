"""worker.rollout beyond single keys: the server's place, its extra arguments, the sampling."""

from collections.abc import Callable

import pytest

from grpo_vlm.config import RolloutConfig
from grpo_vlm.config.check_rollout import OURS
from grpo_vlm.config.schema_rollout import STARTS_SERVER, VLLM_ONLY

Check = Callable[..., list[str]]
FOUR = {"world_size": 4, "num_nodes": 1, "gpus_per_node": 4}
EXTERNAL = ["worker.rollout.placement=external", "worker.rollout.base_url=http://127.0.0.1:8000"]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "GRPO_VLM_ROLLOUT_KEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("items", "message"),
    [
        (["tensor_parallel_size=8"], "tensor_parallel_size: 1 engine(s) of 8 GPU(s) need 8 GPUs, but a shared server"),
        (
            ["tensor_parallel_size=3"],
            "tensor_parallel_size: engines of 3 GPUs, but a shared server has those of the 4",
        ),
        (
            ["tensor_parallel_size=2", "data_parallel_size=3"],
            "data_parallel_size: 3 engine(s) of 2 GPU(s) need 6 GPUs",
        ),
        (["placement=dedicated"], "gpus: is empty; name the GPUs of the dedicated server, e.g. [4]"),
        (["placement=dedicated", "gpus=[4, 4]"], "gpus: [4, 4] names a GPU twice"),
        (
            ["placement=dedicated", "gpus=[3, 4]"],
            "gpus: [3] belong to training processes: the launcher started 4 on this machine, which take GPU 0 to 3. "
            "Name GPUs from 4 on, or start fewer",
        ),
        (
            ["placement=dedicated", "gpus=[6]"],
            "gpus: there is no GPU 6: CUDA_VISIBLE_DEVICES names 6, numbered from 0",
        ),
        (
            ["placement=dedicated", "gpus=[4]", "tensor_parallel_size=2"],
            "gpus: names 1 GPU(s), but worker.rollout.tensor_parallel_size and data_parallel_size ask for a multiple",
        ),
        (
            ["placement=dedicated", "gpus=[4, 5]", "data_parallel_size=1"],
            "gpus: names 2 GPU(s), but worker.rollout.tensor_parallel_size and data_parallel_size ask for 1 x 1",
        ),
    ],
)
def test_a_place_that_does_not_hold_the_server(
    items: list[str], message: str, faults: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,6,7")
    (text,) = faults(*(f"worker.rollout.{item}" for item in items), **FOUR)
    assert text.startswith(f"worker.rollout.{message}")


@pytest.mark.parametrize(
    "items",
    [
        ["tensor_parallel_size=2"],
        ["tensor_parallel_size=3", "data_parallel_size=1"],
        ["placement=dedicated", "gpus=[5, 4]"],
        ["placement=dedicated", "gpus=[4, 5]", "tensor_parallel_size=2"],
    ],
)
def test_a_place_that_holds_it(items: list[str], notices: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,6,7")
    assert notices(*(f"worker.rollout.{item}" for item in items), **FOUR) == []


def test_a_dedicated_server_is_on_one_machine(faults: Check) -> None:
    items = ("worker.rollout.placement=dedicated", "worker.rollout.gpus=[4]")
    (text,) = faults(*items, world_size=8, num_nodes=2, gpus_per_node=4)
    assert text.startswith("worker.rollout.placement: dedicated works on one machine, and the launcher started 2")


def test_an_external_server_needs_an_address_and_a_key(
    faults: Check, notices: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, key = faults("worker.rollout.placement=external")
    assert address.startswith("worker.rollout.base_url: is null; with worker.rollout.placement = external name")
    assert "environment variable GRPO_VLM_ROLLOUT_KEY, which is not set" in key
    monkeypatch.setenv("GRPO_VLM_ROLLOUT_KEY", "k" * 16)
    assert notices(*EXTERNAL) == []
    assert notices(EXTERNAL[0], "worker.rollout.base_url=https://node7:8000/") == []


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("127.0.0.1:8000", "'127.0.0.1:8000' is no address of the form http://HOST:PORT"),
        ("http://127.0.0.1:8000/v1", "'http://127.0.0.1:8000/v1' goes on after the port"),
        ("http://127.0.0.1:99999", "cannot be read as an address"),
        ("ftp://host", "'ftp://host' is no address"),
        ("http://me:secret@host:1", "a user name or password is not part of the address"),
    ],
)
def test_an_address_that_is_none(url: str, problem: str, faults: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRPO_VLM_ROLLOUT_KEY", "k" * 16)
    (text,) = faults(EXTERNAL[0], f"worker.rollout.base_url='{url}'")
    assert text.startswith(f"worker.rollout.base_url: {problem}") and "secret" not in text


def test_extra_arguments_may_not_be_ours(faults: Check, notices: Check) -> None:
    given = "{max_num_seqs: 64, no-enable-prefix-caching: true, compilation_config: {mode: 0}}"
    assert notices(f"worker.rollout.engine_kwargs={given}") == []
    bad = (
        "gpu-memory-utilization: 0.5, no_enable_chunked_prefill: true, api_key: k, '--swap-space': 4, seed: 3, x: null"
    )
    texts = faults(f"worker.rollout.engine_kwargs={{{bad}}}")
    section = "worker.rollout.engine_kwargs"
    assert [text.partition(":")[0].removeprefix(f"{section}.") for text in texts] == [
        "gpu-memory-utilization",
        "no_enable_chunked_prefill",
        "api_key",
        "--swap-space",
        "seed",
        "x",
    ]
    assert texts[0].endswith("cannot be set here: worker.rollout.gpu_memory_utilization decides it")
    assert "other users see a command line" in texts[2] and "is null" in texts[5]
    assert all(OURS.values())
    (text,) = faults("worker.rollout.engine_kwargs={hos: 0.0.0.0}")
    assert "engine_kwargs.hos: cannot be set here: it is short for host" in text


@pytest.mark.parametrize(
    ("items", "start"),
    [
        (["top_p=0.9"], "worker.rollout.top_p or top_k cuts the distribution"),
        (["min_p=0.1"], "worker.rollout.min_p cuts the distribution"),
        (["repetition_penalty=1.1"], "worker.rollout.repetition_penalty changes the distribution"),
        (["stop=['</answer>']"], "worker.rollout.stop ends responses without the end token"),
        (["val_override_config.temperature=0"], "worker.rollout.val_override_config: temperature 0"),
        (["gpus=[1]"], "worker.rollout.gpus has no effect: worker.rollout.placement is shared"),
        (["base_url=http://h:1"], "worker.rollout.base_url has no effect: worker.rollout.placement is shared"),
        (["lora_sync=adapter"], "worker.rollout.lora_sync has no effect: worker.actor.model.lora.rank is 0"),
        (["placement=external", "base_url=http://h:1"], "worker.rollout.base_url is on another machine: key, prompts"),
    ],
)
def test_settings_that_surprise_get_a_notice(
    items: list[str], start: str, notices: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRPO_VLM_ROLLOUT_KEY", "k" * 16)
    (text,) = notices(*(f"worker.rollout.{item}" for item in items))
    assert text.startswith(start)


def test_what_an_external_server_was_not_given_by_us_is_named(notices: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRPO_VLM_ROLLOUT_KEY", "k" * 16)
    (text,) = notices(*EXTERNAL, "worker.rollout.enforce_eager=true", "worker.rollout.port=4000")
    assert text.startswith("worker.rollout.enforce_eager, port: no effect on a server that runs already")
    assert set(STARTS_SERVER) < set(VLLM_ONLY) <= set(vars(RolloutConfig()))


def test_an_empty_stop_text(faults: Check) -> None:
    (empty,) = faults("worker.rollout.stop=[a, '']")
    assert empty.startswith("worker.rollout.stop: holds an empty text")


@pytest.mark.parametrize(
    ("inner", "message"),
    [
        (
            "temperatur: 1",
            "temperatur: unknown key; did you mean temperature? Valid: temperature, top_p, top_k, min_p, rep",
        ),
        ("seed: 1", "seed: unknown key; Valid: temperature"),
        ("n: 0", "n: 0 is out of range; it must be at least 1"),
        ("n: 1.5", "n: is 1.5 (float); expected int"),
        ("n: '2'", "n: is '2' (str); expected int"),
        ("temperature: -1", "temperature: -1 is out of range; it must be at least 0"),
        ("temperature: null", "temperature: is None (NoneType); expected float"),
        ("top_p: 2", "top_p: 2 is out of range; it must be above 0 and at most 1"),
    ],
)
def test_validation_sampling(inner: str, message: str, faults: Check) -> None:
    (text,) = faults(f"worker.rollout.val_override_config={{{inner}}}")
    assert text.startswith(f"worker.rollout.val_override_config.{message}")


def test_keys_of_the_vllm_server_have_no_effect_with_transformers(notices: Check) -> None:
    values = {"dtype": "bf16", "limit_images": 2, "enable_chunked_prefill": "true", "placement": "dedicated"}
    values |= {"gpus": "[1]", "data_parallel_size": 1, "max_model_len": 2000, "gpu_memory_utilization": 0.5}
    values |= {"enforce_eager": "true", "max_num_batched_tokens": 9000, "port": 4000, "start_timeout_s": 5}
    values |= {"request_timeout_s": 5, "step_timeout_s": 50, "max_restarts": 1, "cpu_kv_cache_gb": 2}
    values |= {"engine_kwargs": "{max_num_seqs: 8}", "sync_check_every": -1}
    items = [f"worker.rollout.{name}={value}" for name, value in values.items()]
    assert notices(*items, check_port=False) == []
    (text,) = notices(*items, "worker.rollout.name=transformers")
    assert text == (
        f"worker.rollout.{', '.join(values)}: no effect with worker.rollout.name = transformers; vllm uses it"
    )
