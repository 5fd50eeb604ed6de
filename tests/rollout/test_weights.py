"""Which tensors a sync would send, under which names, from every kind of model. (In a server: test_sync_live.py.)"""

import multiprocessing
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForImageTextToText

from grpo_vlm.errors import RolloutError
from grpo_vlm.rollout.lora import adapter_files
from grpo_vlm.rollout.weights import Weight, gathered, largest_bytes, moving, weights
from tests.tiny import tiny_model

ONE = SimpleNamespace(unwrap_model=lambda model: model, state=SimpleNamespace(deepspeed_plugin=None), num_processes=1)


@pytest.fixture(params=["qwen2_5_vl", "qwen3_vl"])
def path(request, tmp_path_factory) -> Path:
    return tiny_model(request.param, tmp_path_factory.getbasetemp())


@pytest.fixture
def model(tmp_path_factory) -> nn.Module:
    return load(tiny_model("qwen2_5_vl", tmp_path_factory.getbasetemp()))


def load(path) -> nn.Module:
    return AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)


def sent(model, accelerator=ONE) -> dict[str, torch.Tensor]:
    found = [(name, tensor.clone()) for name, tensor in gathered(weights(model, accelerator), accelerator)]
    assert len(found) == len(dict(found))  # nothing twice
    return dict(found)


def same(left, right) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_every_parameter_is_named_and_a_tied_head_too(path):
    model = load(path)
    expected = dict(model.named_parameters())  # a tied one once
    assert "lm_head.weight" not in expected
    head = {"lm_head.weight": expected["model.language_model.embed_tokens.weight"]}
    assert same(sent(model), expected | head)


def test_an_untied_head_is_sent_once(model):
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach() + 1)
    found = sent(model)
    assert torch.equal(found["lm_head.weight"], found["model.language_model.embed_tokens.weight"] + 1)


def test_buffers_that_a_checkpoint_has_are_sent(model):
    model.model.visual.register_buffer("scale", torch.tensor([3.0]))
    model.model.visual.register_buffer("cache", torch.tensor([4.0]), persistent=False)
    found = sent(model)
    assert found["model.visual.scale"] == 3.0 and "model.visual.cache" not in found


def test_names_lose_what_wraps_modules(model):
    stored = sent(model)
    layers = model.model.language_model.layers
    layers[0] = torch.compile(layers[0])
    assert any("_orig_mod" in name for name, _ in model.named_parameters())
    assert same(sent(model), stored)


def test_only_blocks_in_which_something_trains_move(model):
    model.requires_grad_(False)
    model.model.language_model.layers[1].self_attn.v_proj.weight.requires_grad_(True)
    model.model.visual.blocks[0].norm1.weight.requires_grad_(True)
    prefixes = {weight.block for weight in moving(weights(model, ONE))}
    assert prefixes == {"model.language_model.layers.1.self_attn", "model.visual.blocks.0"}
    names = {
        weight.name.rpartition("self_attn.")[2] for weight in moving(weights(model, ONE)) if weight.in_tower is False
    }
    assert {"q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight"} <= names
    assert moving(weights(model.requires_grad_(False), ONE)) == []


@pytest.mark.parametrize("options", [{}, {"use_rslora": True}, {"target_modules": ["q_proj", "embed_tokens"]}])
def test_adapters_are_merged_as_peft_merges_them(model, options):
    from peft import LoraConfig, get_peft_model

    if "embed_tokens" in options.get("target_modules", ()):
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    adapted = get_peft_model(model, LoraConfig(**{"r": 4, "lora_alpha": 32, "target_modules": "all-linear"} | options))
    generator = torch.Generator().manual_seed(0)
    for name, parameter in adapted.named_parameters():
        if ".lora_" in name:
            parameter.data.normal_(std=0.1, generator=generator)
    found, frozen = sent(adapted), dict(model.named_parameters())
    assert any(weight.moves for weight in weights(adapted, ONE)) and frozen
    merged = sent(adapted.merge_and_unload())
    assert found.keys() == merged.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, merged[name], rtol=0, atol=1e-6)


def test_modules_that_train_beside_adapters_are_sent_and_no_copy_of_them(model):
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["merger"])
    names = set(sent(model))
    adapted = get_peft_model(model, config)
    trained = adapted.base_model.model.model.visual.merger.modules_to_save["default"].mlp[0].weight
    trained.data += 1
    found = sent(adapted)
    assert set(found) == names
    assert torch.equal(found["model.visual.merger.mlp.0.weight"], trained)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"use_dora": True, "target_modules": ["q_proj"]},
            r"q_proj: DoRA and LoRA biases \(default\) cannot be merged",
        ),
        ({"target_modules": ["proj"]}, "patch_embed.proj: Conv3d cannot be merged"),
        ({"target_modules": ["embed_tokens"]}, "embed_tokens.weight: a head tied to embeddings with adapters"),
    ],
)
def test_adapters_that_cannot_be_merged_are_named(model, options, message):
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(model, LoraConfig(r=4, **options))
    with pytest.raises(RolloutError, match=message):
        weights(adapted, ONE)


def test_an_adapters_files_are_those_that_peft_writes(model, tmp_path):
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))
    files = adapter_files(adapted)
    adapted.save_pretrained(tmp_path)
    assert same(files.tensors, load_file(tmp_path / "adapter_model.safetensors"))
    assert files.config["r"] == 4 and files.config["peft_type"] == "LORA" and files.config["inference_mode"] is True
    model.lm_head.weight.requires_grad_(True)
    with pytest.raises(RolloutError, match=r"lora_sync: adapter cannot bring .*embed_tokens.*set it to merged"):
        adapter_files(adapted)
    with pytest.raises(RolloutError, match="lora_sync: adapter needs a model with LoRA adapters"):
        adapter_files(load(model.config._name_or_path))


def test_the_largest_weight_is_measured_in_the_servers_type():
    found = [Weight("a", (torch.zeros(10, 10),), True), Weight("b", (torch.zeros(60, dtype=torch.int64),), True)]
    assert largest_bytes(found, ONE, torch.float32) == 480
    assert largest_bytes(found[:1], ONE, torch.bfloat16) == 200


def sharded(rank: int, path: Path, rendezvous: Path) -> None:
    """One of two processes that hold a half of each parameter."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    model = load(path)
    whole, count = sent(model), sum(parameter.numel() for parameter in model.parameters())
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.language_model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert sum(parameter.to_local().numel() for parameter in model.parameters()) < 0.6 * count
    assert same(sent(model), whole)
    dist.destroy_process_group()


def test_tensors_that_fsdp2_has_cut_up_are_whole(tmp_path, tmp_path_factory):
    path = tiny_model("qwen2_5_vl", tmp_path_factory.getbasetemp())
    fork = multiprocessing.get_context("fork")  # two new interpreters would import for half a minute
    ranks = [fork.Process(target=sharded, args=(rank, path, tmp_path / "store"), daemon=True) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
    assert [process.exitcode for process in ranks] == [0, 0]
