"""A packed row scores every completion as a forward pass of that sample alone does, gradients included, through every
wrapper that training puts around a model."""

import copy
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForImageTextToText, LlamaConfig

from grpo_vlm.model import attention, packed
from grpo_vlm.model.packed import PreparedRow, compile_layers, enable_packing, form, media_positions, prepare
from grpo_vlm.model.packing import IMAGE, VIDEO, blank_group, build_row
from grpo_vlm.model.vision import FeatureCache, pad_mlp_width
from tests.model import cases
from tests.model.cases import BANNED, KINDS, TEMPERATURE, Draw

SCORING = {"temperature": TEMPERATURE, "banned_ids": BANNED}


@pytest.fixture(scope="module", params=KINDS)
def parts(request):
    """A packed model, questions, and the scores and gradients of one sample at a time."""
    model = cases.tiny(request.param)
    questions = cases.mixed(request.param)
    scores = cases.single_scores(model, questions)  # before anything of ours touches the model
    expected = cases.gradients(model, cases.weighted(*scores))
    enable_packing(model)
    return model, questions, tuple(score.detach() for score in scores), expected


def check(model, row, scores, expected, **options):
    found = model(packed=row, **SCORING, **options)
    for values, reference in zip(found, scores, strict=True):
        torch.testing.assert_close(values, reference, rtol=0, atol=1e-5)
    cases.assert_same_gradients(cases.gradients(model, cases.weighted(*found)), expected)


def test_a_row_equals_single_samples(parts):
    model, questions, scores, expected = parts
    passes = []
    handle = model.model.visual.register_forward_hook(lambda module, inputs, _: passes.append(len(inputs[0])))
    row = cases.packed_row(model, questions)
    check(model, row, scores, expected)
    handle.remove()
    distinct = {item.key: len(item.pixels) for question in questions for item in question.media}
    assert passes == [sum(distinct.values())]
    assert row.real_tokens < len(row.ids)  # padding is part of the row


def test_wrong_rows_are_told_apart(parts):
    model, questions, scores, _ = parts
    row = cases.packed_row(model, questions)
    with torch.no_grad():
        wrong = model(packed=cases.siblings_visible(row), **SCORING)
    assert (wrong.log_probs - scores[0]).abs().max() > 0.01


def test_checkpointing_changes_nothing(parts):
    model, questions, scores, expected = parts
    row = cases.packed_row(model, questions)
    calls = []
    handle = model.model.language_model.layers[0].input_layernorm.register_forward_hook(lambda *_: calls.append(1))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    check(model, row, scores, expected)
    model.gradient_checkpointing_disable()
    handle.remove()
    assert len(calls) == 2  # once forward, once again in the backward pass


def test_compiled_layers_and_a_wider_mlp_change_nothing(parts):
    model, questions, scores, expected = parts
    compiled = copy.deepcopy(model)
    assert pad_mlp_width(copy.deepcopy(model.model.visual)) == (3 if model.config.model_type == "qwen2_5_vl" else 0)
    compile_layers(compiled, backend="eager", fullgraph=True)
    assert torch._dynamo.config.recompile_limit >= 64
    check(compiled, cases.packed_row(model, questions), scores, expected)


@pytest.mark.parametrize("repeat_below", [0, 8])
def test_flex_attention_scores_the_same(parts, monkeypatch, repeat_below):
    """The CUDA path's forward; FlexAttention has no backward on a CPU (tests/gpu has)."""
    model, questions, scores, _ = parts
    monkeypatch.setattr(attention, "REPEAT_KV_HEADS_BELOW", repeat_below)
    monkeypatch.setattr(packed, "attention_arguments", lambda *row: {"attention_mask": attention.block_mask(*row)})
    with torch.no_grad():
        found = model(packed=cases.packed_row(model, questions, multiple=128), **SCORING)
    torch.testing.assert_close(found.log_probs, scores[0], rtol=0, atol=1e-5)


MEDIA = st.sampled_from([(), ("image",), ("image", "image"), ("video",), ("shared",), ("shared", "image")])
LENGTHS = st.lists(st.integers(1, 6), min_size=1, max_size=3)
SIDES = st.sampled_from([4, 6, 8, 10])
CUTS = st.integers(0, 2)  # after how many completions a group is split, its prompt repeated
QUESTIONS = st.lists(st.tuples(MEDIA, LENGTHS, CUTS, st.integers(1, 12), SIDES, SIDES), min_size=1, max_size=3)
SPLIT = [
    (("shared", "image"), [2, 1, 4], 1, 5, 8, 6),
    (("video",), [3, 1], 1, 2, 4, 8),
    (("shared",), [1, 5, 2], 2, 7, 4, 4),
]


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
def test_drawn_rows_equal_single_samples(kind):
    model = cases.tiny(kind)
    enable_packing(model)  # the reference then runs through the same model's plain form

    @settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @example(SPLIT, 32)  # three groups in six documents
    @given(QUESTIONS, st.sampled_from([1, 32]))
    def compare(specs, multiple):
        draw = Draw()
        shared = draw.media(IMAGE, 1, 4, 6, "shared")
        questions = []
        for number, (media, lengths, _, text, h, w) in enumerate(specs):
            items = [
                shared
                if name == "shared"
                else draw.media(
                    VIDEO if name == "video" else IMAGE,
                    2 if name == "video" else 1,
                    h,
                    w + 2 * place,
                    f"{number}{place}",
                )
                for place, name in enumerate(media)
            ]
            questions.append(draw.question(kind, items, lengths, text))
        scores = cases.single_scores(model, questions)
        expected = cases.gradients(model, cases.weighted(*scores))
        row = cases.packed_row(model, questions, multiple=multiple, cuts=[cut for _, _, cut, *_ in specs])
        check(model, row, [score.detach() for score in scores], expected)

    compare()


# ---------------------------------------------------------------- rows for ranks with nothing to do


def test_a_blank_row_reaches_every_parameter_with_zero(parts):
    model, *_ = parts
    blank = blank_group(Draw().media(IMAGE, 1, 2, 2, "blank"), cases.IMAGE_TOKEN)
    scores = model(packed=build_row([blank], multiple=16), **SCORING)
    assert scores.log_probs.shape == (0,)
    model.zero_grad()
    scores.log_probs.sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and not parameter.grad.any(), name


def test_two_ranks_reduce_to_the_gradients_of_one():
    """DDP, FSDP2 and ZeRO-3 over gloo, in one pair of processes."""
    kinds = ("qwen2_5_vl", "qwen3_vl")
    command = [sys.executable, "-m", "tests.model.packed_worker", *kinds]
    root = Path(__file__).parents[2]
    env = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    for kind, scheme in itertools.product(kinds, ("ddp", "fsdp2", "zero3")):
        assert done.stdout.count(f"{kind} through_{scheme} ok") == 2


# ---------------------------------------------------------------- a frozen tower


def test_a_frozen_tower_runs_once_per_picture(parts):
    model, questions, scores, _ = parts
    frozen = copy.deepcopy(model)
    frozen.model.visual.requires_grad_(False)
    passes = []
    frozen.model.visual.register_forward_hook(lambda module, inputs, _: passes.append(len(inputs[0])))
    cache = FeatureCache()
    first = cases.packed_row(model, questions[:2], cuts=())
    row = cases.packed_row(model, questions)
    with torch.no_grad():
        frozen(packed=first, features=cache, **SCORING)  # the old log-probs, in other rows
    check_scores = frozen(packed=row, features=cache, **SCORING)
    frozen(packed=row, features=cache, **SCORING)
    torch.testing.assert_close(check_scores.log_probs, scores[0], rtol=0, atol=1e-5)
    sizes = {item.key: len(item.pixels) for question in questions for item in question.media}
    assert passes == [sizes["a"] + sizes["shared"] + sizes["b"], sizes["v"]] and len(cache) == 4
    uncached = cases.gradients(frozen, cases.weighted(*frozen(packed=row, **SCORING)))
    cases.assert_same_gradients(cases.gradients(frozen, cases.weighted(*check_scores)), uncached, 1e-6)
    with pytest.raises(ValueError, match="frozen vision tower"):
        model(packed=row, features=cache, **SCORING)


# ---------------------------------------------------------------- what training does with a model


def test_checkpoints_and_copies_do_not_know(parts, tmp_path):
    model, questions, scores, expected = parts
    model.save_pretrained(tmp_path)
    stock = type(cases.tiny(model.config.model_type))
    saved = (tmp_path / "config.json").read_text()
    assert json.loads(saved)["architectures"] == [stock.__name__] and "grpo_vlm" not in saved
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32)
    assert type(loaded) is stock
    enable_packing(loaded)
    enable_packing(loaded)  # again: nothing more
    check(loaded.train(), cases.packed_row(loaded, questions), scores, expected)
    copied = copy.deepcopy(model)
    check(copied, cases.packed_row(copied, questions), scores, expected)


def test_generation_and_padded_batches_stay_as_they_were(parts):
    model, questions, _, _ = parts
    stock = cases.tiny(model.config.model_type).eval()
    model.eval()
    for question in questions[1:]:
        inputs = cases.single_inputs(question, [])
        options = {"do_sample": False, "max_new_tokens": 5, "output_logits": True, "return_dict_in_generate": True}
        ours, theirs = (m.generate(**inputs, **options) for m in (model, stock))
        torch.testing.assert_close(torch.stack(ours.logits), torch.stack(theirs.logits), rtol=0, atol=1e-5)
    ids = torch.tensor([[0, 0, 9, 8, 11], [10, 20, 30, 40, 50]])
    inputs = {"input_ids": ids, "attention_mask": (ids > 0).long()}
    logits = [m(**inputs).logits[inputs["attention_mask"].bool()] for m in (model, stock)]
    torch.testing.assert_close(*logits, rtol=0, atol=1e-5)
    model.train()


def test_through_lora_adapters_on_layers_and_head(parts):
    model, questions, _, _ = parts
    adapted = get_peft_model(
        copy.deepcopy(model),
        LoraConfig(r=4, target_modules=["q_proj", "v_proj", "qkv", "lm_head"], init_lora_weights=False),
    ).train()
    enable_packing(adapted)
    scores = cases.single_scores(adapted, questions)
    expected = cases.gradients(adapted, cases.weighted(*scores))
    assert any("visual" in name for name in expected) and any("lm_head" in name for name in expected)
    check(adapted, cases.packed_row(adapted, questions), scores, expected)


def test_under_autocast(parts):
    """bfloat16 products over float32 weights, as Accelerate's mixed precision wraps a model."""
    model, questions, scores, expected = parts
    wrapped = copy.deepcopy(model)
    accelerator = Accelerator(cpu=True)
    accelerator.native_amp, accelerator.state._mixed_precision = True, "bf16"
    wrapped = accelerator.prepare_model(wrapped)
    found = wrapped(packed=cases.packed_row(model, questions), **SCORING)
    accelerator.state._mixed_precision = "no"
    assert found.log_probs.dtype == found.entropy.dtype == torch.float32
    difference = (found.log_probs - scores[0]).abs()
    assert 1e-4 < difference.mean() < 0.1
    made = cases.gradients(wrapped, cases.weighted(*found))
    assert {value.dtype for value in made.values()} == {torch.float32}
    flat = [torch.cat([values[name].flatten() for name in expected]) for values in (made, expected)]
    assert torch.cosine_similarity(*flat, dim=0) > 0.99


def test_a_prepared_row_scores_the_same_again(parts):
    model, questions, scores, expected = parts
    ready = prepare(cases.packed_row(model, questions), model.config, "cpu", torch.float32)
    assert isinstance(ready, PreparedRow)
    for _ in range(2):
        check(model, ready, scores, expected)


# ---------------------------------------------------------------- what is refused


def test_form_names_the_reason():
    assert form(cases.tiny("qwen3_vl").config) == ("packed", "")
    kind, reason = form(LlamaConfig())
    assert kind == "plain" and "llama" in reason
    config = AutoConfig.for_model("qwen2_5_vl", text_config={"use_sliding_window": True, "max_window_layers": 1})
    assert form(config)[0] == "plain" and "sliding" in form(config)[1]
    config = AutoConfig.for_model("qwen2_5_vl", text_config={"attention_dropout": 0.1})
    assert form(config)[0] == "plain" and "0.1" in form(config)[1]


def test_placeholders_must_match_the_media():
    config = cases.tiny("qwen3_vl").config
    image = Draw().media(IMAGE, 1, 4, 4, "a")
    assert media_positions(config, [9, *[cases.IMAGE_TOKEN] * 4, 9], [image])[0].tolist() == [1, 2, 3, 4]
    with pytest.raises(ValueError, match=r"3 image placeholders .* for 4 features"):
        media_positions(config, [cases.IMAGE_TOKEN] * 3, [image])
