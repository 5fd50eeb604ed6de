"""Whole runs on rows with pictures, videos, both and none: the engine sees what the trainer scores."""

import json
import re
from pathlib import Path

import pytest

from grpo_vlm import DataError, Run
from tests.tiny import tiny_model
from tests.training.rigs import hashed_reward, settings
from tests.training.rigs import rows as picture_rows

CLIPS = Path(__file__).parents[1] / "data" / "video"
IMAGES = CLIPS.parent / "images"
BOUND = 2e-5


def mixed_rows() -> list[dict]:
    """Twice a picture, two pictures, none, a video; and among them a long video, frames, a video beside a picture."""
    made = [{**row, "problem": row["problem"] + " <think>", "videos": []} for row in picture_rows(4)]
    one = made[0]["images"]
    clips = [
        ("<video>What moves?", [], ["example.mp4"]),
        (
            "Long: <video> how long?",
            [],
            [{"video": "nasa_13013.mp4", "fps": 1.5, "max_frames": 20, "max_pixels": 9000}],
        ),
        ("<image> and <video>, then <video>", one, ["h264_10bit.mp4", {"video": "circle.gif", "nframes": 6}]),
        (
            "<video>These frames?",
            [],
            [{"video": [picture.resize((84, 84)) for picture in one * 3], "sample_fps": 4.0}],
        ),
    ]
    made += [{"problem": p, "images": i, "videos": v, "answer": "x"} for p, i, v in clips]
    return [made[number] for number in (0, 4, 2, 6, 3, 5, 1, 7)]


ENGINE = "worker.rollout.name"
CASES = [
    ("qwen2_5_vl", {ENGINE: "vllm"}),
    ("qwen3_vl", {ENGINE: "vllm"}),
    ("qwen2_5_vl", {ENGINE: "transformers", "worker.actor.padding_free": False}),
    ("qwen3_vl", {ENGINE: "transformers", "data.num_workers": 1}),
]


@pytest.mark.parametrize(("kind", "changes"), CASES, ids=[f"{kind}-{changes[ENGINE]}" for kind, changes in CASES])
def test_the_engine_sees_what_the_trainer_scores(tmp_path, tmp_path_factory, kind, changes):
    changes = {
        "data.max_prompt_length": 600,
        "data.image_dir": str(CLIPS),
        "data.max_pixels": 12000,
        "data.shuffle": False,
        "trainer.max_steps": 2,
        "worker.actor.optim.lr": 1e-3,
        "worker.actor.model.model_path": str(tiny_model(kind, tmp_path_factory.getbasetemp())),
        "worker.rollout.cpu_kv_cache_gb": 0.5,
        **changes,
    }
    config = settings(tmp_path_factory.getbasetemp(), tmp_path / "run", **changes)
    Run(config, train_rows=mixed_rows(), reward=hashed_reward).train()
    found = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in found if record["step"] > 0]
    assert len(steps) == 2
    assert all(record["rollout/logprob_diff/mean"] <= BOUND for record in steps), steps
    assert steps[1]["actor/grad_norm"] > 0


def test_bad_media_are_an_error_or_left_out_and_listed(tmp_path, tmp_path_factory, capsys):
    good = mixed_rows()
    gone, empty = {**good[0], "images": ["gone.png"]}, {**good[1], "videos": ["empty.webm"]}
    moving = {**good[0], "images": [str(IMAGES / "animated.gif")]}
    rows = [*good[:2], gone, *good[2:4], empty, moving]
    changes = {"data.max_prompt_length": 600, "data.image_dir": str(CLIPS), "data.max_pixels": 12000}
    config = settings(tmp_path_factory.getbasetemp(), tmp_path / "run", **changes)
    with pytest.raises(DataError, match=r"2 of 7 rows cannot be used:\n.*:2: .*gone\.png.*\n.*:5: .*empty\.webm"):
        Run(config, train_rows=rows, reward=hashed_reward).train()
    skip = {"data.on_bad_media": "skip", "trainer.find_last_checkpoint": True, "trainer.save_freq": 1}
    config = settings(tmp_path_factory.getbasetemp(), tmp_path / "run", **changes, **skip)
    rows.append({**good[0], "problem": "<image>" + "long " * 600})
    Run(config, train_rows=rows, reward=hashed_reward).train()
    listed = [json.loads(line) for line in (tmp_path / "run" / "skipped_rows.jsonl").read_text().splitlines()]
    assert [row["row"].rpartition(":")[2] for row in listed] == ["2", "5", "7"] and "empty.webm" in listed[1]["reason"]
    assert re.fullmatch(r"\d+ tokens, more than data\.max_prompt_length=600", listed[2]["reason"])
    shown = capsys.readouterr()
    text = " ".join((shown.out + shown.err).split())
    assert "2 rows were left out" in text and "1 rows show a moving picture" in text and "easyr1 rows" in text
    # the same rows go on without a word; one that can be used now changes the order, which is said
    for mended, count, said in ((gone, 3, False), (good[0], 2, True)):
        changes["trainer.max_steps"] = changes.get("trainer.max_steps", 1) + 1
        config = settings(tmp_path_factory.getbasetemp(), tmp_path / "run", **changes, **skip)
        Run(config, train_rows=[*rows[:2], mended, *rows[3:]], reward=hashed_reward).train()
        listed = (tmp_path / "run" / "skipped_rows.jsonl").read_text().splitlines()
        shown = capsys.readouterr()
        text = " ".join((shown.out + shown.err).split())
        assert len(listed) == count
        assert ("the training rows are others than those of global_step_2 (5 of 8 rows, " in text) == said
    assert "6 of 8 rows, " in text
