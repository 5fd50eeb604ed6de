"""A row's masks say who sees whom, in both forms that attention takes them in."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, create_mask

from grpo_vlm.model.attention import BLOCK, DocumentMasks, Runs, block_mask, packed_attention

LAYOUTS = st.lists(st.tuples(st.integers(1, 400), st.lists(st.integers(1, 300), max_size=4)), min_size=1, max_size=3)


def layout(groups, padding):
    """Document numbers and segments of groups given as (prompt length, completion lengths)."""
    document, segment = [], []
    for number, (prompt, completions) in enumerate(groups):
        document += [number] * (prompt + sum(completions))
        segment += [0] * prompt
        for completion, length in enumerate(completions):
            segment += [completion + 1] * length
    document, segment = document + [-1] * padding, segment + [0] * padding
    return torch.tensor(document, dtype=torch.int32), torch.tensor(segment, dtype=torch.int32)


def definition(document, segment):
    """Earlier tokens of the same document that are prompt or of the same completion."""

    def visible(b, h, query, key):
        same = (segment[key] == 0) | (segment[key] == segment[query])
        return (key <= query) & (document[query] == document[key]) & same

    return visible


@settings(max_examples=15, deadline=None, derandomize=True)
@given(LAYOUTS, st.booleans())
def test_the_block_mask_is_the_one_that_flex_attention_would_find(groups, whole_blocks):
    n = sum(prompt + sum(completions) for prompt, completions in groups)
    document, segment = layout(groups, -n % BLOCK if whole_blocks else 0)
    n = len(document)
    ours = block_mask(document, segment, "cpu")
    theirs = create_block_mask(definition(document, segment), None, None, n, n, device="cpu")
    for found, expected in zip(ours.as_tuple()[:-1], theirs.as_tuple()[:-1], strict=True):
        if isinstance(expected, torch.Tensor):
            assert found.dtype == expected.dtype and torch.equal(found, expected)
        else:
            assert found == expected
    dense = (create_mask(mask, 1, 1, n, n, device="cpu") for mask in (ours.mask_mod, theirs.mask_mod))
    assert torch.equal(*dense)


def test_blocks_between_a_prompt_and_its_completions_are_full():
    mask = block_mask(*layout([(3 * BLOCK, [2 * BLOCK, BLOCK])], 0), "cpu")
    assert mask.full_kv_num_blocks.tolist() == [[[0, 1, 2, 3, 4, 3]]]
    assert mask.kv_num_blocks.tolist() == [[[1, 1, 1, 1, 1, 1]]]  # the diagonal


@settings(max_examples=10, deadline=None, derandomize=True)
@given(LAYOUTS, st.integers(0, 5))
def test_document_masks_are_the_definition_cut_by_document(groups, padding):
    document, segment = layout(groups, padding)
    n = len(document)
    expected = create_mask(definition(document, segment), 1, 1, n, n, device="cpu")[0, 0]
    masks = DocumentMasks.of(document, segment)
    found = torch.block_diag(*(mask[0, 0] == 0 for mask in masks.masks)).bool()
    assert sum(masks.lengths) == n and torch.equal(found, expected)


def test_a_document_begins_with_its_prompt():
    with pytest.raises(AssertionError, match="begin with its prompt"):
        Runs.of(torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 1, 0]))


def test_without_a_row_it_is_ordinary_attention():
    module = nn.Module()
    module.num_key_value_groups, module.is_causal = 2, True
    query, key, value = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)
    found, _ = packed_attention(module, query, key, value, None, scaling=0.3)
    repeated = (part.repeat_interleave(2, 1) for part in (key, value))
    expected = nn.functional.scaled_dot_product_attention(query, *repeated, is_causal=True, scale=0.3)
    torch.testing.assert_close(found, expected.transpose(1, 2))
