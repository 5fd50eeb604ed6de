"""The shipped start model: small, stock, sees, hedges about the form; and the scoring script's own rules."""

from pathlib import Path

import jinja2
import pytest
import torch
from PIL import Image, ImageDraw
from transformers import AutoModelForImageTextToText, AutoProcessor

from grpo_vlm.demo.evaluate import ASKED_FORM, Question, respond, score, shuffle_pictures

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "grpo_vlm" / "demo" / "model"
COLOURS = {"red": (255, 0, 0), "blue": (0, 0, 255), "yellow": (255, 255, 0), "black": (0, 0, 0)}


@pytest.fixture(scope="module")
def processor():
    return AutoProcessor.from_pretrained(MODEL)


@pytest.fixture(scope="module")
def questions(processor) -> list[Question]:
    """Pictures drawn here, so not from the package: a disc of each colour."""
    made = []
    for answer, colour in COLOURS.items():
        picture = Image.new("RGB", (64, 64), (240, 236, 245))
        ImageDraw.Draw(picture).ellipse((20, 18, 44, 42), fill=colour)
        content = [{"type": "image"}, {"type": "text", "text": "What color is the shape?" + ASKED_FORM}]
        messages = [{"role": "user", "content": content}]
        prompt = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        made.append(Question(prompt, picture, answer))
    return made


def test_folder_is_small() -> None:
    assert sum(file.stat().st_size for file in MODEL.rglob("*")) < 8e6


def test_tokenizer_is_lossless(processor) -> None:
    text = "Ünïcode 你好 🙂 \\boxed{12}\n"
    assert processor.tokenizer.decode(processor.tokenizer(text)["input_ids"]) == text


def test_prompt_has_no_default_system_message(questions) -> None:
    expected = (
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>What color is the shape? Answer in \\boxed{}."
        "<|im_end|>\n<|im_start|>assistant\n"
    )
    assert questions[0].prompt == expected


def test_asked_form_is_the_format_prompt() -> None:
    template = jinja2.Template((ROOT / "configs" / "prompts" / "boxed.jinja").read_text())
    assert template.render(content="Is it red? ").strip() == "Is it red?" + ASKED_FORM


def test_picture_takes_nine_tokens(processor, questions) -> None:
    inputs = processor(text=[questions[0].prompt], images=[questions[0].picture])
    assert inputs["input_ids"][0].count(processor.image_token_id) == 9


def test_model_sees_but_does_not_obey(processor, questions) -> None:
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_pretrained(MODEL, dtype=torch.float32).eval()
    _, greedy_named = score(questions, respond(model, processor, questions, 0))
    sampled, sampled_named = score(questions, respond(model, processor, questions, 32))
    assert greedy_named == 1.0
    assert 0.1 < sampled < 0.4 < sampled_named < 0.8


def test_score_wants_the_exact_form() -> None:
    question = Question("", Image.new("RGB", (1, 1)), "red")
    assert score([question], [["\\boxed{red}", " \\boxed{red}\n", "it is red", "\\boxed{reddish}"]]) == (0.5, 0.75)


def test_shuffle_never_keeps_an_answer() -> None:
    pictures = [Image.new("RGB", (i + 1, 1)) for i in range(60)]
    questions = [Question(str(i), picture, str(i % 4)) for i, picture in enumerate(pictures)]
    shuffled = shuffle_pictures(questions, seed=0)
    sources = [question.picture.width - 1 for question in shuffled]
    assert sorted(sources) == list(range(60))
    assert all(source % 4 != i % 4 for i, source in enumerate(sources))
    assert [question.prompt for question in shuffled] == [str(i) for i in range(60)]
