"""Rows of every shape: the same questions as EasyR1, verl, TRL, R1-V and OpenAI rows are the same prompts."""

import base64
import json
from datetime import date
from decimal import Decimal
from pathlib import Path

import numpy
import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from grpo_vlm.data.dataset import PromptDataset
from grpo_vlm.data.rows import PromptBuilder
from grpo_vlm.data.schemas import Keys, answer_text, detect
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
    return made, made.learn("r", list(rows[0]), rows[:8])


@pytest.mark.parametrize(("name", "convert"), [*SHAPES.items(), ("trl", as_typed_trl)])
def test_geometry3k_in_every_shape_is_the_same_prompts(processor, data_config, name, convert):
    original, _ = builder(data_config, processor, GEO3K)
    rows = [convert(row) for row in GEO3K]
    made, schema = builder(data_config, processor, rows)
    assert schema.name == name and f"{name} rows: question in" in schema.description
    for number, (row, source) in enumerate(zip(rows, GEO3K, strict=True)):
        prompt, expected = made.build(row, f"r:{number}"), original.build(source, f"r:{number}")
        assert prompt.token_ids == expected.token_ids and prompt.text == expected.text
        assert prompt.image_keys == expected.image_keys
        assert prompt.ground_truth == expected.ground_truth == source["answer"]
        assert not any("image" in key for key in prompt.columns)
        sizes = made.picture_sizes(row, f"r:{number}")
        assert made.prompt_length(row, f"r:{number}", sizes) == len(prompt.token_ids)


def test_a_mixture_is_read_part_by_part(processor, data_config):
    original, _ = builder(data_config, processor, GEO3K)
    made = PromptBuilder(data_config(max_prompt_length=2000, prompt_key="prompt"), processor)
    rows = [convert(row) for convert, row in zip(SHAPES.values(), GEO3K, strict=False)]
    names = [made.learn(f"part {number}", list(row), [row]).name for number, row in enumerate(rows)]
    assert names == list(SHAPES)
    for number, (row, source) in enumerate(zip(rows, GEO3K, strict=False)):
        assert made.build(row, f"part {number}:0").token_ids == original.build(source, "r:0").token_ids


@pytest.mark.parametrize("first", ["plain", "both"])
def test_a_part_whose_rows_would_fit_another_part_is_read_by_its_own_columns(processor, data_config, first):
    """Our prepared files have EasyR1's columns and verl's, of which data.prompt_key decides."""
    plain = {"problem": "How many?", "answer": "3"}
    both = plain | {"prompt": user("Count them."), "reward_model": {"ground_truth": "<answer> 3 </answer>"}}
    made = PromptBuilder(data_config(prompt_key="prompt"), processor)
    for name, row in sorted({"plain": plain, "both": both}.items(), key=lambda part: part[0] != first):
        made.learn(name, list(row), [row])
    found = [made.build(row, f"{name}:0") for name, row in (("plain", plain), ("both", both))]
    assert [prompt.ground_truth for prompt in found] == ["3", "<answer> 3 </answer>"]
    assert ["How many?" in prompt.text for prompt in found] == [True, False] and "Count them." in found[1].text


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
        (["messages"], {"prompt": "problem"}, "or leave data.prompt_key at prompt, by which 'messages' is found$"),
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
        (
            user([{"type": "text", "text": "What?"}, {"type": "image_url", "image_url": {}}]),
            "a part of the type image_url has no url; write {'type': 'image_url', 'image_url': {'url'",
        ),
        (user([{"type": "image_url", "image_url": {"url": ""}}]), "a part of the type image_url has no url"),
    ],
)
def test_faulty_messages_name_row_column_and_message(processor, data_config, prompt, message):
    row = {"prompt": prompt, "answer": "a"}
    made = PromptBuilder(data_config(prompt_key="prompt"), processor)
    made.learn("rows", ["prompt", "answer"], [row | {"prompt": user("a")}])
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


WRAPPED = "Asked: {{ content }}!"


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (r"<image>What does \<image> mean, and \<video>?", "|image|What does <image> mean, and <video>?"),
        (r"a \\<image> b", "a \\|image| b"),
        (r"a \\\<image> b<image>", r"a \<image> b|image|"),
        (r"a \\\\<image> b", r"a \\|image| b"),
        (r"\frac{1}{2} \\ <image> \n", r"\frac{1}{2} \\ |image| \n"),
        ([{"type": "image"}, {"type": "text", "text": r"the word \<image>"}], r"|image|the word \<image>"),
        (
            [{"type": "text", "text": "a\\"}, {"type": "image"}, {"type": "text", "text": "<image>"}],
            r"a\|image|<image>",
        ),
        ([{"type": "image"}, *({"type": "text", "text": text} for text in ("\\", "<video>"))], r"|image|\<video>"),
    ],
)
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_backslash_before_a_mark_makes_it_a_word_and_two_are_one(
    processor, data_config, tmp_path, asked, said, wrapped
):
    (tmp_path / "ask.jinja").write_text(WRAPPED)
    row = {"prompt": asked if isinstance(asked, str) else user(asked), "images": [RED], "answer": "the <image> mark"}
    template = str(tmp_path / "ask.jinja") if wrapped else None
    prompt = builder(data_config, processor, [row], format_prompt=template)[0].build(row, "r:0")
    text = prompt.text.replace("<|vision_start|><|image_pad|><|vision_end|>", "|image|")
    assert (WRAPPED.replace("{{ content }}", said) if wrapped else said) in text and len(prompt.images) == 1
    assert prompt.ground_truth == "the <image> mark"


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


# ---------------------------------------------------------------- shapes come from columns, answers from rows


@pytest.mark.parametrize("marked", [0, 3, 7, None])
def test_one_question_with_a_mark_does_not_change_the_shape_of_the_set(processor, data_config, marked):
    """A mark is used where it stands; elsewhere the picture stands before the question."""
    rows = [as_r1v(row) | ({"problem": row["problem"]} if n == marked else {}) for n, row in enumerate(GEO3K[:8])]
    made, schema = builder(data_config, processor, rows)
    assert schema.name == "r1v"
    original, _ = builder(data_config, processor, GEO3K)
    for number, (row, source) in enumerate(zip(rows, GEO3K, strict=False)):
        prompt = made.build(row, f"r:{number}")
        assert prompt.token_ids == original.build(source, f"r:{number}").token_ids
        assert prompt.ground_truth == source["answer"]


def chat(*answer):
    return {"messages": [*user("2 + 2?"), *({"role": "assistant", "content": text} for text in answer)]}


EMPTY = {
    "null": ({"problem": "a?", "answer": None}, "column 'answer' is empty"),
    "blank": ({"problem": "a?", "answer": " \n"}, "column 'answer' is empty"),
    "missing number": ({"problem": "a?", "answer": float("nan")}, "column 'answer' is empty"),
    "verl": ({"prompt": user("a?"), "reward_model": {"ground_truth": ""}}, "'reward_model.ground_truth' is empty"),
    "r1v": ({"problem": "a?", "image": None, "solution": "<answer> </answer>"}, "column 'solution' is empty"),
    "openai": (chat(""), "the assistant's message is empty"),
    "openai without": (chat(), "column 'messages' does not end with the assistant's answer, as other rows do"),
}


@pytest.mark.parametrize("case", EMPTY)
def test_an_empty_answer_is_an_error_unless_the_reward_needs_none(processor, data_config, case):
    row, message = EMPTY[case]
    sound = chat([{"type": "text", "text": "4", "image_url": None}]) if "messages" in row else row
    made, _ = builder(data_config, processor, [sound, row])
    if sound is not row:
        assert made.build(sound, "r:0").ground_truth == "4"
    with pytest.raises(DataError, match=f"r:1: .*{message}; fill the answer .* set data.allow_empty_answer=true"):
        made.build(row, "r:1")
    taken, _ = builder(data_config, processor, [sound, row], allow_empty_answer=True)
    assert taken.build(row, "r:1").ground_truth == taken.answer(row, "r:1") == ""


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": 3, "answer": "1"}, "column 'prompt' must hold the question as text or as messages, found int"),
        ({"prompt": user(""), "answer": "1"}, "the last message of column 'prompt' is empty; fill or remove the row"),
        ({"prompt": "half \ud83d of it", "answer": "1"}, "the prompt holds '.ud83d', half of a surrogate pair"),
        (
            {"prompt": "a", "answer": "x \ude00"},
            "the answer holds '.ude00', half of a surrogate pair .* .at character 2",
        ),
        ({"question": "a", "answer": "1", "image": RED}, "0 <image> marks in .*; write one <image> for each of them"),
    ],
)
def test_rows_that_cannot_be_sent_are_refused(processor, data_config, row, message):
    made, _ = builder(data_config, processor, [row])
    with pytest.raises(DataError, match=f"r:0: .*{message}"):
        made.prompt_length(row, "r:0", made.picture_sizes(row, "r:0"))


def test_messages_as_json_text_are_messages_and_other_brackets_are_text(processor, data_config):
    row = as_verl(GEO3K[0]) | {"prompt": json.dumps(as_verl(GEO3K[0])["prompt"])}
    made, schema = builder(data_config, processor, [row])
    assert (schema.name, schema.conversation) == ("verl", True)
    assert (
        made.build(row, "r:0").token_ids == builder(data_config, processor, GEO3K)[0].build(GEO3K[0], "r:0").token_ids
    )
    for text in ("[1, 2] + [3]?", '["a"]', "[]"):
        row = {"prompt": text, "answer": "1"}
        assert text in builder(data_config, processor, [row])[0].build(row, "r:0").text


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (Decimal("1.50"), "1.50"),
        (date(2026, 1, 2), "2026-01-02"),
        (7, "7"),
        (True, "true"),
        ({"a": [1]}, '{"a": [1]}'),
    ],
)
def test_answers_that_are_no_text_get_the_text_that_people_write(answer, text):
    assert answer_text(answer) == text


def test_rows_from_pandas_are_rows(processor, data_config, tmp_path):
    """Arrays of objects, numpy's numbers and NaN instead of lists, numbers and empty cells."""
    pq.write_table(pa.Table.from_pylist([as_verl(row) for row in GEO3K[:4]]), tmp_path / "a.parquet")
    rows = pandas.read_parquet(tmp_path / "a.parquet").to_dict("records")
    assert type(rows[0]["prompt"]).__name__ == type(rows[0]["images"]).__name__ == "ndarray"
    rows[2] |= {"images": float("nan"), "prompt": "No picture.", "answer": "x"}
    rows[3]["reward_model"] = {"ground_truth": numpy.float32(1.5)}
    given = PromptDataset(rows, data_config(prompt_key="prompt", max_prompt_length=2000), processor)
    assert len(given.validate().kept) == 4
    original, _ = builder(data_config, processor, GEO3K)
    assert given[1].token_ids == original.build(GEO3K[1], "r:1").token_ids
    assert given[2].images == [] and given[3].ground_truth == "1.5"
