"""Rows of every shape: the same questions as EasyR1, verl, TRL, R1-V and OpenAI rows are the same prompts."""

import base64
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from PIL import Image

from grpo_vlm.data.rows import PromptBuilder
from grpo_vlm.data.schemas import Keys, detect
from grpo_vlm.errors import DataError

GEO3K = pq.read_table(Path(__file__).parent / "geo3k_40.parquet").slice(0, 12).to_pylist()
RED, BLUE = Image.new("RGB", (90, 60), "red"), Image.new("RGB", (64, 200), "blue")


def address(picture) -> dict:
    return {"url": "data:image/png;base64," + base64.b64encode(picture["bytes"]).decode(), "detail": None}


def as_easyr1(row):
    return {"problem": row["problem"], "images": row["images"], "answer": row["answer"]}


def as_verl(row):
    return {
        "answer": "as the teacher wrote it",
        "data_source": "geo3k",
        "prompt": [{"role": "user", "content": row["problem"]}],
        "images": row["images"],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": row["answer"]},
        "extra_info": {"index": 3, "answer": "another", "question": row["problem"]},
    }


def as_trl(row):
    text = row["problem"].removeprefix("<image>")
    return {"prompt": [{"role": "user", "content": text}], "image": row["images"][0], "solution": row["answer"]}


def as_typed_trl(row):
    text = row["problem"].removeprefix("<image>")
    parts = [{"type": "image", "text": None}, {"type": "text", "text": text}]
    return {"prompt": [{"role": "user", "content": parts}], "images": row["images"], "answer": row["answer"]}


def as_r1v(row):
    text = row["problem"].removeprefix("<image>")
    return {"image": row["images"][0], "problem": text, "solution": f"<answer> {row['answer']} </answer>"}


def as_openai(row):
    text = {"type": "text", "text": row["problem"].removeprefix("<image>"), "image_url": None}
    parts = [{"type": "image_url", "image_url": address(row["images"][0]), "text": None}, text]
    turns = [{"role": "user", "content": parts}, {"role": "assistant", "content": row["answer"]}]
    return {"messages": turns}


SHAPES = {
    "easyr1": as_easyr1,
    "verl": as_verl,
    "trl": as_trl,
    "r1v": as_r1v,
    "openai": as_openai,
}


def builder(data_config, processor, rows, **keys):
    made = PromptBuilder(data_config(max_prompt_length=2000, **{"prompt_key": "prompt"} | keys), processor)
    return made, made.learn(list(rows[0]), rows[:8])


@pytest.mark.parametrize(("name", "convert"), [*SHAPES.items(), ("trl", as_typed_trl)])
def test_geometry3k_in_every_shape_is_the_same_prompts(processor, data_config, name, convert):
    original, _ = builder(data_config, processor, GEO3K)
    rows = [convert(row) for row in GEO3K]
    made, schema = builder(data_config, processor, rows)
    assert schema.name == name and f"{name} rows: question in" in schema.description
    for number, (row, source) in enumerate(zip(rows, GEO3K, strict=True)):
        prompt, expected = made.build(row, f"rows:{number}"), original.build(source, f"rows:{number}")
        assert prompt.token_ids == expected.token_ids and prompt.text == expected.text
        assert prompt.image_keys == expected.image_keys
        assert prompt.ground_truth == expected.ground_truth == source["answer"]
        assert not any("image" in key for key in prompt.columns)
        sizes = made.picture_sizes(row, "")
        assert made.prompt_length(row, "", sizes) == len(prompt.token_ids)


def test_a_mixture_is_read_part_by_part(processor, data_config):
    original, _ = builder(data_config, processor, GEO3K)
    made = PromptBuilder(data_config(max_prompt_length=2000, prompt_key="prompt"), processor)
    rows = [convert(row) for convert, row in zip(SHAPES.values(), GEO3K, strict=False)]
    names = [made.learn(list(row), [row]).name for row in rows]
    assert names == list(SHAPES)
    for row, source in zip(rows, GEO3K, strict=False):
        assert made.build(row, "r:0").token_ids == original.build(source, "r:0").token_ids


def test_the_users_keys_come_first(processor, data_config):
    row = as_verl(GEO3K[0]) | {"question": "Which? <image>", "pic": RED}
    keys = {"prompt_key": "question", "answer_key": "extra_info.answer", "image_key": "pic"}
    made, schema = builder(data_config, processor, [row], **keys)
    prompt = made.build(row, "r:0")
    assert (schema.prompt, schema.answer, schema.image) == ("question", "extra_info.answer", "pic")
    assert prompt.ground_truth == "another" and "Which? " in prompt.text and prompt.images[0].getpixel((1, 1))[0] > 250


@pytest.mark.parametrize(
    ("columns", "keys", "message"),
    [
        (
            ["promt", "images", "answer"],
            {},
            "the columns promt, images, answer have no question column .* in one of p",
        ),
        (["conversations", "image"], {}, "the columns conversations, image have no question column"),
        (["problem", "images"], {}, "the columns problem, images have no answer beside 'problem' .data.answer_key."),
        (["prompt", "answer"], {"prompt": "query"}, "missing column 'query' .data.prompt_key.; present: prompt, answ"),
        (["prompt", "answer"], {"answer": "a.b"}, "missing column 'a.b' .data.answer_key."),
    ],
)
def test_columns_that_fit_no_shape_are_named(columns, keys, message):
    with pytest.raises(DataError, match=message):
        detect(columns, [dict.fromkeys(columns, "x")], Keys(**keys))


def user(content):
    return [{"role": "user", "content": content}]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "column 'prompt' must hold the question as text or as messages, found list"),
        ([{"from": "human", "value": "a"}], "column 'prompt', message 0 must be {'role', 'content'}, found .{'from'"),
        ([{"role": "human", "content": "a"}], "has the role 'human'; it must be system, user"),
        (user(3), "content must be text or a list of parts, found int"),
        (user([{"type": "audio", "audio": "a.wav"}]), "a part has the type 'audio' .*it must be one of text, image"),
        (
            user([{"type": "image"}, {"type": "text", "text": "a"}]),
            "1 <image> marks in column 'prompt' but 0 pictures",
        ),
        (
            [*user("a"), {"role": "assistant", "content": "b"}],
            "the last message of column 'prompt' is the assistant's; a prompt ends",
        ),
    ],
)
def test_faulty_messages_name_row_column_and_message(processor, data_config, prompt, message):
    row = {"prompt": prompt, "answer": "a"}
    made = PromptBuilder(data_config(prompt_key="prompt"), processor)
    made.learn(["prompt", "answer"], [row | {"prompt": user("a")}])
    with pytest.raises(DataError, match=f"rows:3: .*{message}"):
        made.build(row, "rows:3")


def test_marks_stand_in_any_message_and_media_follow_in_order(processor, data_config, tmp_path):
    (tmp_path / "ask.jinja").write_text("Q: {{ content }} Think.")
    turns = [
        {"role": "system", "content": "Old rules."},
        {"role": "user", "content": "First <image>."},
        {"role": "assistant", "content": "Seen."},
        {"role": "user", "content": [{"type": "text", "text": "Then <image>?"}]},
    ]
    row = {"prompt": turns, "images": [RED, BLUE], "answer": "a"}
    keys = {"format_prompt": str(tmp_path / "ask.jinja"), "system_prompt": "Be brief."}
    made, _ = builder(data_config, processor, [row], **keys)
    prompt = made.build(row, "r:0")
    shape = [(m["role"], [p.get("text", p["type"]) for p in m["content"]]) for m in prompt.messages]
    assert shape == [
        ("system", ["Be brief."]),
        ("user", ["First ", "image", "."]),
        ("assistant", ["Seen."]),
        ("user", ["Q: Then ", "image", "? Think."]),
    ]
    assert [picture.getpixel((2, 2))[0] > 200 for picture in prompt.images] == [True, False]
    assert prompt.columns["prompt"] == prompt.messages
    assert prompt.text.count(processor.image_token) == 2


def test_escaped_marks_are_words(processor, data_config, tmp_path):
    (tmp_path / "ask.jinja").write_text("{{ content }}!")
    row = {"prompt": r"<image>What does \<image> mean, and \<video>?", "images": [RED], "answer": "the <image> mark"}
    for template in (None, str(tmp_path / "ask.jinja")):
        prompt = builder(data_config, processor, [row], format_prompt=template)[0].build(row, "r:0")
        assert "What does <image> mean, and <video>?" in prompt.text and len(prompt.images) == 1
        assert prompt.ground_truth == "the <image> mark"
    parts = [{"type": "image"}, {"type": "text", "text": "the word <image>"}]
    typed = {"prompt": user(parts), "images": [RED], "answer": "a"}
    assert "the word <image>" in builder(data_config, processor, [typed])[0].build(typed, "r:0").text


@pytest.mark.parametrize(("marks", "pictures"), [(1, 2), (2, 1), (0, 1), (1, 0)])
def test_counts_of_marks_and_pictures_must_agree(processor, data_config, marks, pictures):
    row = {"prompt": "<image>" * marks + "What?", "images": [RED] * pictures, "answer": "<image>"}
    message = rf"r:9: {marks} <image> marks in column 'prompt' but {pictures} pictures in column 'images'.*What\?"
    with pytest.raises(DataError, match=message):
        builder(data_config, processor, [row])[0].build(row, "r:9")


@pytest.mark.parametrize("empty", [None, []])
@pytest.mark.parametrize("make", [as_trl, as_r1v])
def test_a_row_that_fills_the_other_column_keeps_its_picture(make, empty):
    """`images` decides the set's column, but is empty in a row whose `image` is filled."""
    row = make(GEO3K[0])
    schema = detect([*row, "images"], [row | {"images": empty}])
    read = schema.read(row | {"images": empty}, "file:0")
    assert read.images == row["image"] and not {"image", "images"} & set(read.columns)
    assert schema.read(row | {"images": GEO3K[1]["images"]}, "file:1").images == GEO3K[1]["images"]
