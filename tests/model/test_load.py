"""Entries of config.json that a run replaces: the trainer's model has them, and the server's command line."""

import json

import pytest
from transformers import AutoProcessor, CLIPImageProcessor, LlavaProcessor

from grpo_vlm.config import load_config
from grpo_vlm.errors import ConfigError
from grpo_vlm.model.load import load_policy, load_processor, load_reference
from grpo_vlm.rollout.command import server_command, server_settings
from tests.tiny import tiny_model


def config(root, entries):
    items = [f"worker.actor.model.model_path={tiny_model('qwen2_5_vl', root)}"]
    return load_config(None, [*items, f"worker.actor.model.override_config={json.dumps(entries)}"])


def test_policy_reference_and_server_get_the_same_entries(tmp_path_factory):
    entries = {"text_config": {"rms_norm_eps": 0.05}}
    made = config(tmp_path_factory.getbasetemp(), entries)
    for load in (load_policy, load_reference):
        assert load(made).model.language_model.norm.variance_epsilon == 0.05
    command = server_command(server_settings(made, "cpu"), 1234)
    assert json.loads(command[command.index("--hf-overrides") + 1]) == entries


def test_a_family_without_patch_grids_is_refused_before_its_weights_load(tmp_path_factory):
    path = tmp_path_factory.mktemp("llava")
    parts = AutoProcessor.from_pretrained(tiny_model("qwen2_5_vl", tmp_path_factory.getbasetemp()))
    LlavaProcessor(CLIPImageProcessor(), parts.tokenizer, patch_size=14).save_pretrained(path)
    made = load_config(None, [f"worker.actor.model.model_path={path}"])
    with pytest.raises(ConfigError, match=r"model_path: '.*' has a LlavaProcessor\. Models are supported whose"):
        load_processor(made)


def test_an_entry_that_is_not_there_is_named_with_the_nearest(tmp_path_factory):
    made = config(tmp_path_factory.getbasetemp(), {"text_config": {"rms_norm_epsilon": 0.05}})
    with pytest.raises(ConfigError, match=r"override_config\.text_config\.rms_norm_epsilon: .* rms_norm_eps\?"):
        load_policy(made)
