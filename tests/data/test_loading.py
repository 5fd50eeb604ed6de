"""From the data set to a training step: each picture decoded once per step and rank, the same order after a resume."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import ImageFile

from grpo_vlm.config import load_config
from grpo_vlm.data import PromptDataset
from grpo_vlm.data.workers import PromptPool
from grpo_vlm.training.plan import RolloutPlan
from tests.data.test_dataset import png

GEO3K = Path(__file__).parent / "geo3k_40.parquet"


@pytest.fixture
def decodes(monkeypatch) -> list[int]:
    """Sizes of the pictures whose pixels Pillow has decoded."""
    found = []
    load = ImageFile.ImageFile.load

    def counting(self):
        if self.tile:
            found.append(self.size)
        return load(self)

    monkeypatch.setattr(ImageFile.ImageFile, "load", counting)
    return found


def config(group: int, **data):
    settings = load_config(None, ["data.rollout_batch_size=8", "worker.actor.global_batch_size=4"])
    settings.worker.rollout.n = group
    settings.data = replace(settings.data, prompt_key="problem", min_pixels=3136, max_pixels=100352, **data)
    return settings


@pytest.mark.parametrize("group", [2, 64])
def test_a_picture_is_decoded_once_a_step_and_rank_however_many_answers(decodes, processor, group):
    settings = config(group)
    rows = PromptDataset(str(GEO3K), settings.data, processor)
    for rank in range(2):
        plan = RolloutPlan(rows, settings, 3, rank=rank, world_size=2)
        for step in range(3):
            decodes.clear()
            prompts = [prompt for update in range(2) for prompt in plan[2 * step + update]]
            assert len(prompts) == len(decodes) == 4


def test_a_picture_of_several_rows_is_decoded_once(decodes, processor, tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.png").write_bytes(png("red" if name == "a" else "blue"))
    table = [{"problem": "<image>?", "images": ["ab"[n % 2] + ".png"], "answer": str(n)} for n in range(8)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, table)))
    settings = config(4, image_dir=str(tmp_path))
    rows = PromptDataset(str(tmp_path / "a.jsonl"), settings.data, processor)
    prompts = RolloutPlan(rows, settings, 1, rank=0, world_size=1)[0]
    assert len(prompts) == 8 and len(decodes) == 2


def test_a_mixture_goes_on_in_the_same_order_with_and_without_workers(processor, tmp_path):
    (tmp_path / "b.jsonl").write_text(json.dumps({"problem": "What?", "answer": "x"}))
    settings = config(2)
    rows = PromptDataset(f"{GEO3K},{tmp_path}/b.jsonl", settings.data, processor)
    assert len(rows.validate().kept) == 41

    def ids(plan, updates):
        return [prompt.row_id for update in updates for prompt in plan[update]]

    whole = ids(RolloutPlan(rows, settings, 7, rank=0, world_size=1), range(14))
    assert len(set(whole[:40])) == 40 and len(whole) == 56  # an epoch has no row twice
    pool = PromptPool(1)
    resumed = RolloutPlan(rows, settings, 7, rank=0, world_size=1, pool=pool)
    assert ids(resumed, range(6, 14)) == whole[24:]
    pool.close()
