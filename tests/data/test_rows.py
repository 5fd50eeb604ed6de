"""Rows become prompts that the processor itself agrees with, on Qwen2.5-VL and Qwen3-VL."""

import copy
import pickle

import pytest
import torch
from PIL import Image

from grpo_vlm.data.rows import PromptBuilder
from grpo_vlm.errors import ConfigError, DataError

RED, BLUE = Image.new("RGB", (90, 60), "red"), Image.new("RGB", (64, 200), "blue")


def row(problem="<image>What color?", images=(RED,), answer="red", **columns):
    return {"problem": problem, "images": list(images), "answer": answer, **columns}


@pytest.mark.parametrize(
    ("problem", "images"),
    [
        ("<image>What color?", [RED]),
        ("Compare <image> with\r\n<image>: the same?", [RED, BLUE]),
        ("What is 2 + 2?", []),
        ("end mark <image>", [BLUE]),
    ],
)
def test_ids_and_pixels_equal_the_processors_own(processor, data_config, problem, images):
    prompt = PromptBuilder(data_config(), processor).build(row(problem, images), "rows:0")
    full = processor(text=[prompt.text], images=prompt.images or None, return_tensors="pt")
    assert prompt.token_ids == full["input_ids"][0].tolist()
    assert prompt.token_ids.count(processor.image_token_id) > 3 * len(images) or not images
    if not images:
        assert prompt.pixel_values is None and prompt.image_grid_thw is None
        return
    assert torch.equal(prompt.pixel_values, full["pixel_values"])
    assert torch.equal(prompt.image_grid_thw, full["image_grid_thw"])
    patch = processor.image_processor.patch_size
    sizes = [[1, image.height // patch, image.width // patch] for image in prompt.images]
    assert prompt.image_grid_thw.tolist() == sizes


def test_a_picture_that_was_resized_once_stays_as_it_is(processor, data_config):
    # 709x380 enlarged to min_pixels and cut to the processor's own maximum: the rule is not idempotent on such sizes
    config = data_config(min_pixels=262144, max_pixels=4194304)
    builder = PromptBuilder(config, processor)
    source = row(images=[Image.effect_noise((709, 380), 50)])
    first = builder.build(source, "rows:0")
    again = processor.image_processor(images=first.images, return_tensors="pt")
    assert torch.equal(again["pixel_values"], first.pixel_values)
    assert torch.equal(again["image_grid_thw"], first.image_grid_thw)
    assert builder.prompt_length(source, "rows:0", [(709, 380)]) == len(first.token_ids)


def test_marks_become_parts_in_reading_order_after_the_format_prompt(processor, data_config, tmp_path):
    template = tmp_path / "ask.jinja"
    template.write_text("{{ content | trim }} Answer in \\boxed{}.\n")
    config = data_config(format_prompt=str(template), system_prompt="Be brief.")
    prompt = PromptBuilder(config, processor).build(row(" A <image> B <image>", [RED, BLUE], tag="x"), "rows:7")
    assert prompt.messages == [
        {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "A "},
                {"type": "image"},
                {"type": "text", "text": " B "},
                {"type": "image"},
                {"type": "text", "text": " Answer in \\boxed{}."},
            ],
        },
    ]
    assert prompt.text.startswith("<|im_start|>system\nBe brief.<|im_end|>") and "helpful" not in prompt.text
    assert prompt.text.endswith("Answer in \\boxed{}.<|im_end|>\n<|im_start|>assistant\n")
    assert prompt.row_id == "rows:7" and prompt.columns["tag"] == "x" and "images" not in prompt.columns


def test_answers_that_are_not_text_become_text(processor, data_config):
    builder = PromptBuilder(data_config(), processor)
    assert builder.build(row(answer=12), "rows:0").ground_truth == "12"
    assert builder.build(row(answer=[1.5, "a"]), "rows:0").ground_truth == '[1.5, "a"]'


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (row(images=[RED, BLUE]), "rows:3: 1 <image> marks .* but 2 pictures .*'<image>What color\\?'"),
        (row("no mark"), "rows:3: 0 <image> marks .* but 1 pictures"),
        ({"problem": "<image>?", "pic": RED, "answer": "a"}, "no such column; present: problem, pic, answer"),
        (row(answer=None), "rows:3: column 'answer' is empty"),
        (row(problem=None), "rows:3: column 'problem' must hold the question as text or as mess.* found NoneType"),
        ({"problem": "a", "images": []}, "rows:3: the columns problem, images have no answer beside 'problem'"),
        (row(videos=["a.mp4"]), "rows:3: 0 <video> marks in column 'problem' but 1 videos in column 'videos'"),
        (row("<video>?", (), videos=["a.mp4"]), "rows:3: column 'videos', video 0: a.mp4 does not exist; check the"),
        (
            row("?", (), audio=b"RIFF"),
            "rows:3: column 'audio' is filled, but audio is not supported; remove the column",
        ),
        (row(images=[b"GIF89a"]), "rows:3: column 'images', picture 0: cannot be decoded"),
        (row("<image><image>", [RED, Image.new("RGB", (900, 3))]), "picture 1: .*900x3: aspect ratio 300.0"),
        (row("<image>a <|image_pad|>"), "rows:3: the chat template gives 2 image tokens for 1 pictures"),
        (row("<image>" + "long " * 600), r"rows:3: the prompt has \d+ tokens \(\d+ of them for media\)"),
    ],
)
def test_faults_name_row_and_column(processor, data_config, bad, message):
    with pytest.raises(DataError, match=message):
        PromptBuilder(data_config(), processor).build(bad, "rows:3")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ contents }}", r"uses \['contents'\]; it must use `content`"),
        ("no variable", "uses no variable"),
        ("{{ content", "line 1: "),
        ("a\n{{ content | no_such }}", r"data\.format_prompt: .*bad\.jinja, line 2: No filter named 'no_such'"),
    ],
)
def test_format_prompt_is_checked_before_any_row(processor, data_config, tmp_path, template, message):
    (tmp_path / "bad.jinja").write_text(template)
    with pytest.raises(ConfigError, match=message):
        PromptBuilder(data_config(format_prompt=str(tmp_path / "bad.jinja")), processor)
    with pytest.raises(ConfigError, match=r"data\.format_prompt: 'gone\.jinja' is not a file"):
        PromptBuilder(data_config(format_prompt="gone.jinja"), processor)


def test_a_template_that_writes_the_question_twice_is_refused(processor, data_config, tmp_path):
    (tmp_path / "twice.jinja").write_text("{{ content }} {{ content }}")
    builder = PromptBuilder(data_config(format_prompt=str(tmp_path / "twice.jinja")), processor)
    with pytest.raises(DataError, match="turns 1 <image> marks into 2"):
        builder.build(row(), "rows:0")


def test_override_chat_template_replaces_the_processors(processor, data_config, tmp_path):
    own = "{% for m in messages %}{% for p in m['content'] %}{{ p['text'] if 'text' in p else '<|image_pad|>' }}"
    (tmp_path / "own.jinja").write_text(own + "{% endfor %}{% endfor %}#")
    builder = PromptBuilder(data_config(override_chat_template=str(tmp_path / "own.jinja")), processor)
    assert builder.build(row(), "rows:0").text == "<|image_pad|>What color?#"


def test_a_chat_template_with_a_syntax_error_names_key_and_line(processor, data_config, tmp_path):
    (tmp_path / "own.jinja").write_text("{% for m in messages %}\n{% endif %}")
    builder = PromptBuilder(data_config(override_chat_template=str(tmp_path / "own.jinja")), processor)
    with pytest.raises(ConfigError, match=r"data\.override_chat_template: .*own\.jinja, line 2: .*endif"):
        builder.build(row(), "rows:0")


@pytest.mark.parametrize("key", ["format_prompt", "override_chat_template"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a\ngröß {{ content }}".encode("latin-1"), "line 2: is not UTF-8"),
        (b"\xef\xbb\xbf{{ content }}", "byte-order"),
    ],
)
def test_template_files_are_plain_utf8(processor, data_config, tmp_path, key, content, message):
    (tmp_path / "bad.jinja").write_bytes(content)
    with pytest.raises(
        ConfigError, match=rf"data\.{key}: .*bad\.jinja, line \d: .*{message.partition(': ')[2] or message}"
    ):
        PromptBuilder(data_config(**{key: str(tmp_path / "bad.jinja")}), processor)


def test_the_shipped_format_prompts_keep_the_question(processor, data_config, pytestconfig):
    for name in ("boxed", "math"):
        path = pytestconfig.rootpath / "configs" / "prompts" / f"{name}.jinja"
        text = PromptBuilder(data_config(format_prompt=str(path)), processor).build(row(), "rows:0").text
        assert "What color?" in text and "\\boxed{}" in text
        assert ("<think> </think>" in text) == (name == "math")


def test_a_builder_survives_pickling_with_its_template(processor, data_config, tmp_path):
    (tmp_path / "ask.jinja").write_text("Q: {{ content }}")
    builder = PromptBuilder(data_config(format_prompt=str(tmp_path / "ask.jinja")), processor)
    before = builder.build(row(), "rows:0")
    after = pickle.loads(pickle.dumps(builder)).build(row(), "rows:0")
    assert after.token_ids == before.token_ids and "Q: " in after.text


def test_no_limit_of_the_tokenizer_cuts_a_prompt(processor, data_config):
    """A tokenizer that was saved with a maximal length truncates where it is not told otherwise, image tokens too."""
    limited = copy.deepcopy(processor)
    limited.tokenizer.init_kwargs["max_length"] = limited.tokenizer.model_max_length = 16
    limited.tokenizer.backend_tokenizer.enable_truncation(16)
    source = row("<image>" + "many words " * 20)
    expected = PromptBuilder(data_config(), processor).build(source, "r:0")
    assert PromptBuilder(data_config(), limited).build(source, "r:0").token_ids == expected.token_ids
    assert len(expected.token_ids) > 40
