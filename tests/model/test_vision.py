"""The vision tower over many pictures at once gives what it gives for each alone."""

import inspect

import pytest
import torch
from torch.nn.attention import varlen

from grpo_vlm.model import vision
from grpo_vlm.model.packed import enable_packing
from grpo_vlm.model.packing import IMAGE, VIDEO, MediaBatch
from grpo_vlm.model.vision import FeatureCache, Segments, VisionPlan, encode, pad_mlp_width, vision_attention
from tests.model import cases
from tests.model.cases import KINDS, Draw

GRIDS = {IMAGE: [(1, 12, 20), (1, 8, 8), (1, 4, 6)], VIDEO: [(3, 8, 4), (2, 6, 6)]}


def batches() -> list[MediaBatch]:
    draw = Draw()
    made = []
    for kind, grids in GRIDS.items():
        items = [draw.media(kind, *grid, f"{kind}{number}") for number, grid in enumerate(grids)]
        made.append(
            MediaBatch(
                kind=kind,
                keys=tuple(item.key for item in items),
                pixels=torch.cat([item.pixels for item in items]),
                grid=torch.stack([item.grid for item in items]),
                positions=torch.empty(0, dtype=torch.long),
                features=torch.empty(0, dtype=torch.long),
            )
        )
    return made


def one_by_one(tower, media):
    """Merged and DeepStack features from a stock tower, each picture in a pass of its own."""
    parts = []
    for batch in media:
        for pixels, grid in zip(batch.pixels.split(batch.grid.prod(-1).tolist()), batch.grid, strict=True):
            output = tower(pixels, grid_thw=grid[None])
            parts.append((output.pooler_output, *(output.get("deepstack_features") or ())))
    return [torch.cat(layer) for layer in zip(*parts, strict=True)]


def towers(kind):
    stock, ours = cases.tiny(kind), cases.tiny(kind)
    enable_packing(ours)
    return stock.model.visual, ours.model.visual


@pytest.mark.parametrize("kind", KINDS)
def test_one_pass_equals_a_pass_for_each(kind):
    stock, ours = towers(kind)
    media = batches()
    expected, found = one_by_one(stock, media), encode(ours, media).flat()
    assert len(found) == (3 if kind == "qwen3_vl" else 1)
    for ours_layer, layer in zip(found, expected, strict=True):
        torch.testing.assert_close(ours_layer, layer, rtol=0, atol=2e-5)
    weights = [torch.randn_like(layer) for layer in expected]
    made = [
        cases.gradients(tower, sum((weight * layer).sum() for weight, layer in zip(weights, layers, strict=True)))
        for tower, layers in ((ours, found), (stock, expected))
    ]
    cases.assert_same_gradients(*made)


@pytest.mark.parametrize("kind", KINDS)
def test_a_stock_call_of_the_tower_still_works(kind):
    """The plain padded form and generation give it no plan."""
    stock, ours = towers(kind)
    media = batches()
    for found, expected in zip(one_by_one(ours, media), one_by_one(stock, media), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)


def test_a_plan_leaves_the_tower_nothing_to_work_out(monkeypatch):
    """Lengths are read from the CPU's grid once, and no block asks for them again."""
    made = []
    of = Segments.of
    monkeypatch.setattr(Segments, "of", lambda bounds: made.append(1) or of(bounds))
    _, tower = towers("qwen2_5_vl")
    media = batches()
    plan = VisionPlan.of(tower.config, torch.cat([batch.grid for batch in media]), "cpu")
    assert len(made) == 2  # frames and windows
    encode(tower, media, plan)
    assert len(made) == 2
    assert {name for name in plan.arguments if "seqlen" in name} == {
        "cu_seqlens", "max_seqlen", "cu_window_seqlens", "max_window_seqlen"
    }  # fmt: skip


def test_segments_of_different_lengths_do_not_mix():
    bounds = torch.tensor([0, 3, 4, 7, 12, 13], dtype=torch.int32)
    query, key, value = (torch.randn(1, 2, 13, 4) for _ in range(3))
    found, _ = vision_attention(None, query, key, value, None, bounds, 5, scaling=0.5)
    for first, last in zip(bounds.tolist(), bounds.tolist()[1:], strict=False):
        part = slice(first, last)
        expected = torch.nn.functional.scaled_dot_product_attention(
            query[:, :, part], key[:, :, part], value[:, :, part], scale=0.5
        )
        torch.testing.assert_close(found[:, part], expected.transpose(1, 2))
    assert Segments.of(bounds).sizes == ((2, 1), (2, 3), (1, 5))
    assert Segments.of(torch.tensor([0, 4, 8])).order is None


def test_torchs_varlen_kernel_takes_what_we_give_it():
    """Its signature, on the release that is installed; tests/gpu runs it."""
    parameters = list(inspect.signature(varlen.varlen_attn).parameters)
    assert parameters[:7] == ["query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k"]
    assert "scale" in parameters


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_keeps_each_picture(kind):
    _, tower = towers(kind)
    tower.requires_grad_(False)
    media = batches()
    expected = [layer.clone() for layer in encode(tower, media).flat()]
    passes = []
    tower.register_forward_hook(lambda module, inputs, _: passes.append(len(inputs[0])))
    cache = FeatureCache()
    encode(tower, media[1:], None, cache)
    for _ in range(2):
        for found, layer in zip(encode(tower, media, None, cache).flat(), expected, strict=True):
            torch.testing.assert_close(found, layer, rtol=0, atol=2e-5)
    assert passes == [len(media[1].pixels), len(media[0].pixels)] and len(cache) == 5
    assert not encode(tower, media, None, cache).merged.requires_grad


def test_a_wider_mlp_is_exact_and_leaves_the_weights_alone(monkeypatch):
    monkeypatch.setattr(vision, "MLP_MULTIPLE", 16)
    stock, ours = (cases.tiny("qwen2_5_vl").model.visual for _ in range(2))
    assert pad_mlp_width(ours) == 3 and pad_mlp_width(cases.tiny("qwen3_vl").model.visual) == 0
    widths = []
    ours.blocks[0].mlp.act_fn.register_forward_hook(lambda module, inputs, _: widths.append(inputs[0].shape[-1]))
    states = torch.randn(7, 32)
    for block, other in zip(ours.blocks, stock.blocks, strict=True):
        found, expected = block.mlp(states), other.mlp(states)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
        made = [cases.gradients(part.mlp, (out * out).sum()) for part, out in ((block, found), (other, expected))]
        cases.assert_same_gradients(*made)
    assert widths == [64] and ours.blocks[0].mlp.gate_proj.weight.shape == (52, 32)
    assert ours.state_dict().keys() == stock.state_dict().keys()
