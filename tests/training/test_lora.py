"""LoRA: only adapters train, the base is the reference, checkpoints are whole and an adapter, resume is exact."""

import pytest
import torch
from transformers import AutoModelForImageTextToText

from grpo_vlm.errors import ConfigError
from tests.training.rigs import largest_difference, parameters, session, settings

LORA = {
    "worker.actor.model.lora.rank": 4,
    "worker.actor.model.lora.alpha": 8,
    "worker.actor.optim.lr": 1e-2,
    "algorithm.disable_kl": False,
    "algorithm.use_kl_loss": True,
    "algorithm.kl_penalty": "low_var_kl",
    "trainer.save_freq": 1,
    "trainer.val_before_train": False,
}


def test_adapters_train_are_merged_and_resume(tmp_path, tmp_path_factory):
    root = tmp_path_factory.getbasetemp()

    def train(folder, steps):
        changes = {**LORA, "trainer.max_steps": steps}
        with session(settings(root, tmp_path / folder, **changes)) as parts:
            parts.train()
            return parts.trainer.model, parameters(parts.trainer), parts.trainer.state.log_history

    model, whole, records = train("whole", 2)
    training = {name for name, value in model.named_parameters() if value.requires_grad}
    assert training and all(".lora_" in name and "visual" not in name for name in training)
    assert records[0]["actor/kl_loss"] == 0.0 < records[1]["actor/kl_loss"]
    train("broken", 1)
    _, resumed, _ = train("broken", 2)
    assert largest_difference(whole, resumed) == 0.0

    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path / "whole" / "global_step_2" / "model")
    merged = dict(model.merge_and_unload().named_parameters())
    for name, value in loaded.named_parameters():
        torch.testing.assert_close(value, merged[name], atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("tower", "merger", "still"),
    [(True, None, {"tower", "merger"}), (True, False, {"tower"}), (False, True, {"merger"}), (False, None, set())],
)
def test_tower_and_merger_freeze_apart(tmp_path, tmp_path_factory, tower, merger, still):
    changes = {"worker.actor.model.freeze_vision_tower": tower, "worker.actor.model.freeze_merger": merger}
    with session(settings(tmp_path_factory.getbasetemp(), tmp_path / "run", **changes)) as parts:
        vision = {n: p.requires_grad for n, p in parts.trainer.model.named_parameters() if "visual" in n}
    frozen = {"merger" if "merger" in name else "tower" for name, trains in vision.items() if not trains}
    moving = {"merger" if "merger" in name else "tower" for name, trains in vision.items() if trains}
    assert frozen == still and moving == {"tower", "merger"} - still


def test_the_base_cannot_be_moved_to_the_policy(tmp_path, tmp_path_factory):
    with pytest.raises(ConfigError, match="without its adapters"):
        settings(tmp_path_factory.getbasetemp(), tmp_path, **LORA, **{"algorithm.ref_model_sync_steps": 2})
