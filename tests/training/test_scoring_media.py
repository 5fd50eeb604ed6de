"""Both forms of scoring give the same numbers for rows with pictures, videos, both and none, whatever ids the
completions hold."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from grpo_vlm.config import Config
from grpo_vlm.data import PromptDataset
from grpo_vlm.model.packed import enable_packing
from grpo_vlm.rollout.types import Completion, banned_token_ids
from grpo_vlm.training.batch import Group, Padding, RolloutBatch, blank_image, pad
from grpo_vlm.training.scoring import make_scorer
from tests.tiny import tiny_model

CLIPS = Path(__file__).parents[1] / "data" / "video"
RED, BLUE = Image.new("RGB", (90, 60), "red"), Image.new("RGB", (64, 100), "blue")
SHOWN = [
    ("<image>What?", [RED], []),
    ("<video>What moves?", [], [{"video": "nasa_13013.mp4", "fps": 1.3, "max_pixels": 6000}]),
    ("No picture.", [], []),
    ("<video> or <image>, or <image>, or <video>", [BLUE, RED], ["circle.gif", {"video": [RED] * 6, "sample_fps": 5}]),
]


def parts(kind, root):
    path = tiny_model(kind, root)
    processor = AutoProcessor.from_pretrained(path)
    keys = {"prompt_key": "problem", "min_pixels": 3136, "max_pixels": 12000, "max_prompt_length": 700}
    table = [{"problem": p, "images": i, "videos": v, "answer": "a"} for p, i, v in SHOWN]
    rows = PromptDataset(table, replace(Config().data, image_dir=str(CLIPS), **keys), processor)
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
    enable_packing(model)
    return processor, model, rows.prompts(range(len(rows)))


def completions(processor, model):
    """Some of ordinary words; one of the ids that stand for media; one that ends with the id that also pads."""
    config, pad_id = model.config, processor.tokenizer.pad_token_id
    media = (config.image_token_id, config.video_token_id, config.vision_start_token_id, config.image_token_id)
    ids = [(20, 31, 42), media, (55, pad_id)]
    return tuple(Completion(tokens, (0.0,) * len(tokens), "stop", "", 0) for tokens in ids)


def scores(processor, model, prompts, *, packed, banned=True, blank=False):
    config = Config()
    config.worker.actor.padding_free = packed
    padding = Padding(
        pad_id=processor.tokenizer.pad_token_id,
        image_id=model.config.image_token_id,
        device=torch.device("cpu"),
        blank_image=blank_image(model.config) if blank else None,
    )
    ids = banned_token_ids(processor, model.config) if banned else []
    scorer = make_scorer(config, model, banned_ids=ids, padding=padding, sharded=False)
    answers = completions(processor, model)
    batch = RolloutBatch.of([Group(prompt, answers, ({"overall": 0.0},) * len(answers)) for prompt in prompts])
    whole = torch.zeros(len(batch.samples), 4)
    with torch.no_grad():
        for row in scorer.rows(batch, range(len(prompts))):
            found = scorer.score(model, row)
            whole[found.samples, : found.log_probs.shape[1]] = found.log_probs
            assert torch.isfinite(found.log_probs).all()
    return whole, batch


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
def test_packed_and_padded_rows_score_the_same(tmp_path_factory, kind):
    processor, model, prompts = parts(kind, tmp_path_factory.getbasetemp())
    packed, batch = scores(processor, model, prompts, packed=True, banned=False)
    padded, _ = scores(processor, model, prompts, packed=False, banned=False)
    words = torch.arange(len(packed)) % 3 != 1  # the plain form reads a placeholder of an answer as padding
    torch.testing.assert_close(packed[words], padded[words], rtol=0, atol=2e-5)
    alone = torch.cat([scores(processor, model, [p], packed=False, banned=False, blank=True)[0] for p in prompts])
    torch.testing.assert_close(alone, padded, rtol=0, atol=2e-5)
    assert batch.mask.sum(-1).tolist() == [3, 4, 2] * 4  # an end token that also pads counts once
    assert (padded != 0).sum(-1).tolist() == [3, 4, 2] * 4


def test_a_video_moves_the_scores_and_placeholders_of_answers_are_words(tmp_path_factory):
    processor, model, prompts = parts("qwen2_5_vl", tmp_path_factory.getbasetemp())
    padding = Padding(processor.tokenizer.pad_token_id, model.config.image_token_id, torch.device("cpu"))
    padding = replace(padding, video_id=model.config.video_token_id, positions=lambda prompt: torch.zeros(3, 1).long())
    batch = pad([(prompts[1], answer) for answer in completions(processor, model)], padding)
    types, grid = batch.inputs["mm_token_type_ids"], prompts[1].videos[0].grid
    assert types.unique().tolist() == [0, 2] and (types == 2).sum() == 3 * grid.prod() // 4
    first, _ = scores(processor, model, prompts[1:2], packed=True)
    clip = prompts[1].videos[0]
    other = replace(prompts[1], videos=(replace(clip, key="other", pixels=clip.pixels.flip(0)),))
    assert (scores(processor, model, [other], packed=True)[0] - first).abs().max() > 1e-3
    later = replace(prompts[1], videos=(replace(clip, seconds_per_grid=3 * clip.seconds_per_grid),))
    assert (scores(processor, model, [later], packed=True)[0] - first).abs().max() > 1e-4
