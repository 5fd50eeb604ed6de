"""What a row holds reaches the prompt, or an error or a note says that it does not."""

import json
from pathlib import Path

import pytest
from PIL import Image
from transformers import AutoProcessor

from grpo_vlm.cli import main as cli
from grpo_vlm.data.dataset import PromptDataset
from grpo_vlm.data.rows import PromptBuilder
from grpo_vlm.data.schemas import Keys, answer_text, detect
from grpo_vlm.data.video import VideoRule, clip_shape
from grpo_vlm.errors import DataError, MediaError
from tests.tiny import tiny_model

RED = Image.new("RGB", (90, 60), "red")
R1V = {"image": RED, "problem": "What colour?", "solution": "<answer>red</answer>"}
TRL = {"image": RED, "prompt": [{"role": "user", "content": "What colour?"}], "answer": "red"}
FRAMES = [Image.new("RGB", (60, 60), (30 * number, 0, 0)) for number in range(8)]


def prompts(processor, data_config, rows, **keys):
    usual = {"prompt_key": "prompt" if "prompt" in rows[0] else "problem"}
    return PromptDataset(rows, data_config(**(usual | keys)), processor)


def asked(*parts):
    return {"prompt": [{"role": "user", "content": list(parts)}], "answer": "a"}


@pytest.fixture(scope="module")
def processor(tmp_path_factory):
    """One of the two is enough where no pixel is looked at."""
    return AutoProcessor.from_pretrained(tiny_model("qwen3_vl", tmp_path_factory.mktemp("tiny")))


# ---------------------------------------------------------------- columns


@pytest.mark.parametrize(
    ("row", "keys", "message"),
    [
        (
            R1V,
            {"image_key": "imag"},
            "missing column 'imag' .data.image_key., while 'image' is filled; present: image",
        ),
        (TRL, {"image_key": "pic"}, "missing column 'pic' .data.image_key., while 'image' is filled"),
        (TRL, {"image_key": "meta.pic"}, "missing column 'meta.pic'"),
        (
            {"videos": [FRAMES], **{key: TRL[key] for key in ("prompt", "answer")}},
            {"video_key": "vid"},
            "missing column 'vid' .data.video_key., while 'videos' is filled",
        ),
    ],
)
def test_a_media_key_that_is_no_column_is_an_error_when_media_are_there(processor, data_config, row, keys, message):
    with pytest.raises(DataError, match=message):
        prompts(processor, data_config, [row], **keys)
    late = [{key: None if key in ("image", "videos") else value for key, value in row.items()}] * 9 + [row]
    with pytest.raises(DataError, match=f"rows:9: {message}"):  # beyond the rows that tell the shape
        prompts(processor, data_config, late, **keys).validate()


def test_rows_without_media_need_no_column_of_that_name(processor, data_config):
    rows = prompts(processor, data_config, [{"problem": "2 + 2?", "answer": "4"}], image_key="pic")
    assert rows.validate().notes == ()
    assert "no column of pictures or videos" in rows.schemas["rows"].description


@pytest.mark.parametrize("column", ["pictures", "Image"])
def test_a_column_that_sounds_like_media_and_shows_nothing_is_noted(processor, data_config, column):
    row = {column: RED, "problem": "What colour?", "solution": "red"}
    (note,) = prompts(processor, data_config, [row]).validate().notes
    assert note.startswith("no row shows a picture or a video; the columns are ")
    assert f"{column}, problem, solution, and {column} may be meant" in note
    assert prompts(processor, data_config, [row], image_key=column).validate().notes == ()


def test_a_media_key_reaches_into_a_struct(processor, data_config):
    row = {"problem": "<image>What?", "answer": "a", "meta": {"img": RED, "id": 7}}
    (prompt,) = prompts(processor, data_config, [row], image_key="meta.img")
    assert len(prompt.images) == 1 and prompt.columns["meta"] == {"id": 7}


# ---------------------------------------------------------------- answers


@pytest.mark.parametrize(("key", "gold"), [(None, "A"), ("answer", "B"), ("reward_model.ground_truth", "A")])
def test_an_answer_key_that_is_set_comes_first(processor, data_config, key, gold):
    row = {"problem": "Which?", "answer": "B", "reward_model": {"ground_truth": "A"}}
    assert [prompt.ground_truth for prompt in prompts(processor, data_config, [row], answer_key=key)] == [gold]
    only = {name: value for name, value in row.items() if name != "answer"}  # EasyR1's files set answer_key: answer
    assert [prompt.ground_truth for prompt in prompts(processor, data_config, [only], answer_key=key)] == ["A"]


@pytest.mark.parametrize("answer", [[], [None], [""], [[" "]]])
def test_a_list_of_nothing_is_no_answer(answer):
    schema = detect(["problem", "answer"], [{"problem": "a?", "answer": answer}])
    with pytest.raises(DataError, match="column 'answer' is empty"):
        schema.read({"problem": "a?", "answer": answer}, "r:0")
    assert answer_text(schema.read({"problem": "a?", "answer": [0]}, "r:0").answer) == "[0]"


def test_the_last_answer_tag_counts():
    row = R1V | {"solution": "In <answer></answer> tags: <answer> red </answer>"}
    assert detect(list(row), [row]).read(row, "r:0").answer == "red"


def test_rows_without_an_answer_column_are_taken_when_none_is_needed():
    row = {"prompt": "Write a poem."}
    with pytest.raises(DataError, match=r"set data\.allow_empty_answer=true"):
        detect(list(row), [row])
    assert detect(list(row), [row], Keys(empty_answer=True)).read(row | {"audios": []}, "r:0").answer == ""


# ---------------------------------------------------------------- parts and settings


@pytest.mark.parametrize(
    "row",
    [
        asked({"type": "image", "image": RED}, {"type": "text", "content": "What colour?"}),
        asked({"image": RED}, {"text": "What colour?", "image_url": {"url": None}}) | {"audio": {"path": None}},
        asked({"type": "image", "image": RED, "text": None}, {"type": "text", "text": "What colour?", "image": ""}),
        {"messages": [{"role": "user", "content": json.dumps(
            [{"type": "image"}, {"type": "text", "text": "What colour?"}])}], "answer": "a", "images": [RED]},
    ],
)  # fmt: skip
def test_parts_as_people_write_them(processor, data_config, row):
    (prompt,) = prompts(processor, data_config, [row], prompt_key="prompt")
    assert [part.get("text", part["type"]) for part in prompt.messages[0]["content"]] == ["image", "What colour?"]
    assert len(prompt.images) == 1


TEXT = {"type": "text", "text": "Q"}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (asked({"text": "Q", "image": RED}), "a part of text has image as well; make a part of its own"),
        (asked({"type": "image", "image": RED, "text": "Q"}), "a part of the type image has text as well"),
        (asked({"type": "text", "text": ["Q", "R"]}), "the text of a part must be text, found list"),
        (asked({"type": "text", "text": "Q", "value": "R"}), "a part of text has value as well"),
        (asked({"type": "image", "image": RED, "resized_height": 28}, TEXT), "the keys resized_height, which are not"),
        (asked({"type": "image", "max_pixels": 28}, TEXT) | {"images": [RED]}, "the keys max_pixels, which are not"),
        (TRL | {"image": {"image": RED, "max_pixels": 9, "min_pixels": 1}}, "'image'.* the keys max_pixels, min_pixe"),
        (
            TRL | {"image": {"path": "a.png", "crop": [0, 0, 5, 5]}},
            "the keys crop, which are not taken .*; resize or crop",
        ),
        (
            asked({"type": "video", "fps": 20, "shape": 3}, TEXT) | {"videos": [FRAMES]},
            "the keys shape, which are not",
        ),
    ],
)
def test_what_would_be_lost_is_refused_by_name(processor, data_config, row, message):
    skipping = prompts(processor, data_config, [row], prompt_key="prompt", on_bad_media="error")
    with pytest.raises(DataError, match=f"rows:0: .*{message}"):
        skipping.validate()


def test_a_part_says_how_the_video_of_the_column_is_taken(processor, data_config):
    part = {"type": "video", "sample_fps": 4.0, "max_frames": 4}
    row = asked(part, TEXT) | {"videos": [{"video": FRAMES}]}
    (prompt,) = prompts(processor, data_config, [row], prompt_key="prompt")
    rule = VideoRule.of(processor.video_processor, data_config())
    expected = clip_shape({"video": FRAMES, "sample_fps": 4.0, "max_frames": 4}, rule)
    assert prompt.videos[0].shape == expected and len(expected.indices) == 4 and expected.fps == 4.0


# ---------------------------------------------------------------- templates, setups, command lines


@pytest.mark.parametrize("body", ["{{ raise_exception('no tools here') }}", "{{ messages[0].nothing.more }}"])
def test_a_chat_template_that_refuses_a_row_names_row_and_file(processor, data_config, tmp_path, body):
    (tmp_path / "chat.jinja").write_text(body)
    rows = prompts(processor, data_config, [R1V], override_chat_template=str(tmp_path / "chat.jinja"))
    message = r"rows:0: data.override_chat_template \(.*chat.jinja\) cannot write this row: .*; fix one of the two"
    with pytest.raises(DataError, match=message):
        rows.validate()


@pytest.mark.parametrize(
    ("picture", "message"), [("https://a.example/b.png", "set it, or"), ("s3://b/c.png", "pip install s3fs")]
)
def test_skipping_bad_media_does_not_skip_what_the_setup_lacks(processor, data_config, picture, message):
    rows = [R1V, R1V | {"image": picture}, R1V | {"image": "gone.png"}]
    with pytest.raises(
        DataError, match=f"1 of 3 rows cannot be used:\n  rows:1: column 'image', picture 0: .*{message}"
    ):
        prompts(processor, data_config, rows, on_bad_media="skip").validate()
    with pytest.raises(MediaError, match=r"rows:2: column .image., picture 0: gone\.png does not exist"):
        PromptBuilder(data_config(), processor).build(rows[2], "rows:2")


def test_data_check_takes_the_command_line_of_verl(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    rows = [{"prompt": [{"role": "user", "content": "2 + 2?"}], "reward_model": {"ground_truth": "4"}}] * 3
    Path(tmp_path / "a=1.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    line = "algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=4 +data.max_prompt_length=64 trainer.nnodes=1"
    assert cli(["data", "check", str(tmp_path / "a=1.jsonl"), *line.split()]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "verl rows: question in 'prompt'" in shown and "longer than 64 tokens, left out" in shown
