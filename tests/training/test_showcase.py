"""Which groups of a step are shown, and what of them: real prompts with a picture, a video and neither. That two
processes show what one does is in test_run.py."""

import io
from pathlib import Path

import pytest
from PIL import Image
from transformers import AutoProcessor

from grpo_vlm.config import load_config
from grpo_vlm.data.rows import PromptBuilder
from grpo_vlm.report import Sample
from grpo_vlm.report.groups import MAX_PICTURES, MAX_SIDE, thumbnail
from grpo_vlm.rollout.types import Completion
from grpo_vlm.training.batch import Group
from grpo_vlm.training.observe import placed
from grpo_vlm.training.showcase import show
from tests.tiny import tiny_model

DATA = Path(__file__).parents[1] / "data"
VIDEO = str(DATA / "video" / "example.mp4")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    processor = AutoProcessor.from_pretrained(tiny_model("qwen2_5_vl", tmp_path_factory.getbasetemp()))
    config = load_config(None, ["data.max_pixels=300000", "data.max_prompt_length=4000", "data.prompt_key=problem"])
    builder = PromptBuilder(config.data, processor)
    rows = [
        {"problem": "<image><image>Which?", "images": [Image.new("RGB", (800, 400), c) for c in ("red", "blue")]},
        {"problem": "<video>What moves?", "videos": [VIDEO]},
        {"problem": "What is 1 + 1?"},
    ]
    return [builder.build({**row, "answer": "2"}, f"rows:{place}") for place, row in enumerate(rows)]


def make(prompts, rewards):
    """Groups of two answers in the order of `rewards`, and their samples as the trainer places them."""
    groups, rows = [], []
    for place, pair in enumerate(rewards):
        prompt = prompts[place % len(prompts)]
        done = Completion((5, 6), (-1.0, -1.0), "stop", "\\boxed{2}", 0)
        scores = tuple(None if reward is None else {"overall": reward} for reward in pair)
        group = Group(prompt, (done, done), scores, place, counted=(True, False))
        samples = [
            Sample(4, "train", prompt.row_id, prompt.text, done.text, "2", dict(score or {}), 0.5, 2, "stop")
            for score in scores
        ]
        groups.append(group)
        rows += placed(samples, [group], [reward or 0.0 for reward in pair])
    return groups, rows


def test_a_few_groups_are_shown_with_their_media(prompts):
    groups, rows = make(prompts, [(1, 0), (0.5, 0.5), (1, 1), (0, 0), (None, None), *[(0.5, 0.6)] * 7])
    shown = show([rows], groups)
    assert [group.why for group in shown if group.why != "drawn evenly"] == [
        "widest spread of the step",
        "highest mean reward of the step",
        "lowest mean reward of the step",
    ]
    assert len(shown) == 6 and {group.step for group in shown} == {4}
    assert [answer.counted for answer in shown[0].answers] == [True, False]
    assert [(answer.read, answer.reward) for answer in shown[0].answers] == [("2", 1), ("2", 0)]


def test_pictures_and_frames_are_made_small(prompts):
    groups, rows = make(prompts, [(1, 0)] * 3)
    with_pictures, with_video, with_text = show([rows], groups)
    assert with_pictures.question[-1] == ("user", "[picture][picture]Which?")
    sizes = [Image.open(io.BytesIO(picture.webp)).size for picture in with_pictures.pictures]
    assert sizes == [image.size for image in prompts[0].images]  # small enough already
    large = thumbnail(Image.new("RGB", (800, 400)), "k")
    assert Image.open(io.BytesIO(large.webp)).size == (MAX_SIDE, MAX_SIDE // 2)
    colours = [Image.open(io.BytesIO(picture.webp)).getpixel((9, 9)) for picture in with_pictures.pictures]
    assert colours[0][0] > 200 > 60 > colours[0][2] and colours[1][2] > 200 > 60 > colours[1][0]
    assert len(with_video.pictures) == MAX_PICTURES == len({picture.key for picture in with_video.pictures})
    assert with_video.question[-1] == ("user", "[video]What moves?") and with_text.pictures == ()
