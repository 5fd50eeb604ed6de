"""Operations, seconds and bytes of rows, against model classes, transformers' windows and figures from a GPU."""

import pytest
import torch
from torch import nn
from transformers import AutoModelForImageTextToText, LlamaConfig, Qwen2_5_VLConfig, Qwen2VLConfig, Qwen3VLConfig
from transformers.vision_utils import get_vision_cu_seqlens, get_vision_window_index

from grpo_vlm.model.cost import (
    Flops,
    Mode,
    ModelShape,
    Speed,
    executed_flops,
    forward_flops,
    forward_seconds,
    row_bytes,
    row_seconds,
    train_flops,
    train_seconds,
    utilization,
)
from grpo_vlm.model.packing import Load

TEXT = {"hidden_size": 2048, "num_hidden_layers": 36, "num_attention_heads": 16, "num_key_value_heads": 2}
TEXT |= {"intermediate_size": 11008, "vocab_size": 151936}
CONFIG = Qwen2_5_VLConfig(
    text_config=TEXT,
    vision_config={"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16}
    | {"fullatt_block_indexes": [7, 15, 23, 31], "out_hidden_size": 2048},
)
SHAPE = ModelShape.of(CONFIG)
TERA, GIB = 1e12, 2**30
# The workload of the probe that was measured on one H200: prompt tokens, image, and lengths of 16 x 8 completions.
PROMPT, IMAGE = 542, (1, 40, 40)
COMPLETIONS = """
    157 350 321 399 486 152 337 443 226 234 285 476 130 477 487 225
    364 232 151 469 151 142 130 462 328 153 117 298 403 404 256 489
    220 351 192 211 145 257 387 207 466 246 333 290 161 318 230 498
    228 185 474 346 244 481 382 258 143 334 114 483 373 325 123 135
    155 483 215 360 249 253 309 284 165 259 369 116 261 262 332 447
    110 379 310 112 200 140 185 333 260 326 262 142 382 150 128 159
    399 163 110 355 446 145 500 356 395 162 176 345 243 287 347 331
    137 202 154 477 104 397 351 143 498 106 225 268 445 271 151 442
"""


def attended(prompt, lengths):
    return prompt * (prompt + 1) // 2 + sum(n * prompt + n * (n + 1) // 2 for n in lengths)


def probe_rows(groups_a_row):
    """The probe's 16 groups of 8 completions, 36,102 tokens in all."""
    numbers = [int(number) for number in COMPLETIONS.split()]
    lengths = [numbers[first : first + 8] for first in range(0, 128, 8)]
    rows = []
    for first in range(0, 16, groups_a_row):
        part = lengths[first : first + groups_a_row]
        scored = sum(map(sum, part))
        tokens = -(-(scored + PROMPT * groups_a_row) // 128) * 128
        rows.append(Load(tokens, sum(attended(PROMPT, g) for g in part), scored, (IMAGE,) * groups_a_row))
    return rows


def total(function, groups_a_row, *args):
    return sum((function(SHAPE, row, *args) for row in probe_rows(groups_a_row)), Flops()).total


def test_forward_pass_of_a_group_by_parts():
    """64 prompts of 520 tokens, 8 answers of 300: 2.12 + 2.93 + 13.79 + 1.49 = 20.33 TFLOP."""
    vision = forward_flops(SHAPE, Load(grids=(IMAGE,))).total
    prefix = forward_flops(SHAPE, Load(tokens=520, pairs=attended(520, []))).total
    answers = forward_flops(SHAPE, Load(tokens=2400, pairs=attended(520, [300] * 8) - attended(520, []))).total
    head = forward_flops(SHAPE, Load(scored=2400)).total
    expected = [2.12, 2.93, 13.79, 1.49]
    assert [part / TERA for part in (vision, prefix, answers, head)] == pytest.approx(expected, rel=0.02)
    whole = forward_flops(SHAPE, Load(2920, attended(520, [300] * 8), 2400, (IMAGE,)))
    assert whole.total == pytest.approx(vision + prefix + answers + head)
    assert whole.total / TERA == pytest.approx(20.33, rel=0.02)


@pytest.mark.parametrize(("groups", "plain", "again"), [(1, 0.988, 1.286), (2, 0.973, 1.266), (4, 0.971, 1.263)])
def test_executed_operations_of_the_probe(groups, plain, again):
    assert total(executed_flops, groups) / 1e15 == pytest.approx(plain, abs=6e-4)
    assert total(executed_flops, groups, Mode(checkpointing=True)) / 1e15 == pytest.approx(again, abs=6e-4)
    assert total(forward_flops, 4) / 1e15 == pytest.approx(0.315, abs=6e-4)


def test_training_is_three_forward_passes_less_what_is_frozen():
    row = probe_rows(4)[0]
    forward = forward_flops(SHAPE, row)
    assert train_flops(SHAPE, row).total == pytest.approx(3 * forward.total)
    assert train_flops(SHAPE, row, Mode(checkpointing=True)) == train_flops(SHAPE, row)
    frozen = train_flops(SHAPE, row, Mode(vision="forward"))
    assert (frozen.text, frozen.vision, frozen.vision_attention) == pytest.approx(
        (3 * forward.text, forward.vision, forward.vision_attention)
    )
    cached = executed_flops(SHAPE, row, Mode(vision="cached", checkpointing=True))
    assert (cached.vision, cached.vision_attention) == (0, 0)
    assert train_flops(SHAPE, row, Mode(adapters=True)).text == pytest.approx(2 * forward.text)


CONFIGS = {
    "qwen2_vl": Qwen2VLConfig(text_config=TEXT | {"num_hidden_layers": 3}, vision_config={"depth": 2}),
    "qwen2_5_vl": CONFIG,
    "qwen3_vl": Qwen3VLConfig(
        text_config=TEXT | {"num_hidden_layers": 3, "head_dim": 96}, vision_config={"out_hidden_size": 2048}
    ),
}


def weights(module):
    return sum(part.weight.numel() for part in module.modules() if isinstance(part, (nn.Linear, nn.Conv3d)))


@pytest.mark.parametrize("family", CONFIGS)
def test_parameters_are_those_of_the_model(family):
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(CONFIGS[family])
    shape, tower = ModelShape.of(CONFIGS[family]), model.model.visual
    assert shape.text.parameters == weights(model.model.language_model)
    assert shape.head_parameters == weights(model.lm_head)
    assert shape.vision.parameters == weights(tower.blocks)
    assert shape.patch_dim * shape.vision.hidden == weights(tower.patch_embed)
    assert shape.merger_parameters == weights(tower) - weights(tower.blocks) - weights(tower.patch_embed)


@pytest.mark.parametrize("grid", [(1, 40, 40), (1, 6, 22), (3, 18, 8), (1, 2, 2)])
def test_vision_pairs_are_those_of_transformers_windows(grid):
    rows = torch.tensor([grid])
    full, windows = get_vision_cu_seqlens(rows), get_vision_window_index(rows, 2, 112, 14)[1]
    pairs = 4 * int(full.diff().pow(2).sum()) + 28 * int(torch.as_tensor(windows).unique().diff().pow(2).sum())
    assert forward_flops(SHAPE, Load(grids=(grid,))).vision_attention == 4 * 1280 * pairs


def test_a_gpu_is_found_by_its_whole_name():
    assert utilization(790e12, 2.0, "NVIDIA H200") == pytest.approx(0.5)
    assert utilization(148e12, 1.0, "NVIDIA H20", gpus=2) == pytest.approx(0.5)
    assert utilization(1e12, 1.0, "NVIDIA H2") is None


# Forward and backward of the 16 groups: groups a row -> measured seconds, eager and compiled or fused.
@pytest.mark.parametrize(("groups", "measured"), [(1, [5.11]), (2, [3.57, 3.42]), (4, [3.03, 2.55, 2.31])])
def test_predicted_seconds_are_near_the_measured(groups, measured):
    predicted = sum(train_seconds(SHAPE, row, Speed(790.0)) for row in probe_rows(groups))
    assert all(abs(predicted / seconds - 1) <= 0.21 for seconds in measured), predicted


def test_predicted_seconds_with_checkpointing_and_without_gradient():
    rows = probe_rows(4)
    again = sum(train_seconds(SHAPE, row, Speed(790.0), Mode(checkpointing=True)) for row in rows)
    assert 2.99 <= again <= 3.72  # compiled and eager
    assert sum(forward_seconds(SHAPE, row, Speed(790.0)) for row in rows) == pytest.approx(0.879, rel=0.05)


@pytest.mark.parametrize("config", [*CONFIGS.values()])
def test_every_part_of_a_row_takes_time(config):
    cost = row_seconds(config, torch.device("cpu"))
    base = Load(1000, 100_000, 500, ((1, 8, 8),))
    more = [Load(2000, 100_000, 500, base.grids), Load(1000, 200_000, 500, base.grids)]
    more += [Load(1000, 100_000, 900, base.grids), Load(1000, 100_000, 500, (*base.grids, (1, 8, 8)))]
    assert all(cost(row) > cost(base) > cost(Load()) > 0 for row in more)


def test_another_family_is_counted_in_tokens():
    assert ModelShape.of(LlamaConfig()) is None
    cost = row_seconds(LlamaConfig(), torch.device("cpu"))
    assert cost(Load(tokens=20)) == pytest.approx(2 * cost(Load(tokens=10, pairs=7)))


# groups a row -> GiB measured: eager, fused, with checkpointing
@pytest.mark.parametrize(
    ("groups", "gib"), [(1, [33.2, None, 16.8]), (2, [50.5, 40.8, 18.2]), (4, [82.4, 63.7, 20.6])]
)
def test_predicted_peak_is_within_four_percent(groups, gib):
    ways = [{"fused": False}, {}, {"mode": Mode(checkpointing=True)}]
    for options, measured in zip(ways, gib, strict=True):
        row_peaks = [row_bytes(SHAPE, row, head_gradient_width=2, **options) for row in probe_rows(groups)]
        assert measured is None or 13.98 + max(row_peaks) / GIB == pytest.approx(measured, rel=0.04), options


def test_frozen_and_cached_towers_keep_nothing():
    row = probe_rows(1)[0]
    assert row_bytes(SHAPE, row, Mode(vision="forward")) == row_bytes(SHAPE, Load(row.tokens, row.pairs, row.scored))
