"""Packed rows hold every completion once, exactly as a sample alone would be built, within the budget."""

import io
import random
from itertools import product
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from grpo_vlm.data.media import SizeRule
from grpo_vlm.model.balance import Limits, assign, fill
from grpo_vlm.model.packing import Load, Media, PackGroup, blank_group, build_row, load_of, pack

GEO3K = Path(__file__).parents[1] / "data" / "geo3k_40.parquet"
PAD, BLANK_ID = 1, 2


def media(key, kind, *grid):
    """Pixels that tell which item and which patch they are."""
    patches = grid[0] * grid[1] * grid[2]
    pixels = 1000.0 * sum(map(ord, key)) + torch.arange(patches)
    return Media(key, kind, pixels[:, None].repeat(1, 3), torch.tensor(grid))


POOL = [
    media("a", "image", 1, 2, 2),
    media("b", "image", 1, 4, 2),
    media("c", "image", 1, 4, 6),
    media("d", "video", 2, 2, 4),
    media("a", "video", 3, 2, 2),
]
BLANK = blank_group(media("blank", "image", 1, 2, 2), BLANK_ID)


def seconds(load):
    """Any cost with a fixed part."""
    patches = sum(t * h * w for t, h, w in load.grids)
    return 5.0 + load.tokens + 0.01 * load.pairs + 0.5 * load.scored + 2.0 * patches


@st.composite
def group_lists(draw):
    groups, sample = [], 0
    numbers = random.Random(draw(st.integers(0, 1000)))
    for number in range(draw(st.integers(0, 6))):
        items = draw(st.lists(st.sampled_from(POOL), max_size=3))
        prompt, places = [numbers.randint(3, 99)], []
        for item in items:
            places.append(torch.tensor([len(prompt) + 2 * feature for feature in range(item.features)]))
            prompt += [numbers.randint(3, 99) for _ in range(2 * item.features)]
        lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=5))
        groups.append(
            PackGroup(
                prompt_ids=prompt,
                prompt_positions=torch.tensor([[numbers.randint(0, 50) for _ in prompt] for _ in range(3)]),
                completions=[[numbers.randint(3, 99) for _ in range(length)] for length in lengths],
                samples=range(sample, sample + len(lengths)),
                media=tuple(items),
                media_positions=tuple(places),
                name=f"file:{number}",
            )
        )
        sample += len(lengths)
    return groups


@st.composite
def choices(draw):
    return {
        "max_tokens": draw(st.integers(1, 80)),
        "max_samples": draw(st.none() | st.integers(1, 6)),
        "multiple": draw(st.sampled_from([1, 8, 16])),
        "pad_id": PAD,
        "blank": draw(st.sampled_from([None, BLANK])),
    }


def visible(row):
    """[N, N], the rule by which query (first) sees key, written out."""
    position = torch.arange(len(row.ids))
    same = row.document[:, None] == row.document[None]
    key_segment, query_segment = row.segment[None], row.segment[:, None]
    return (position[None] <= position[:, None]) & same & ((key_segment == 0) | (key_segment == query_segment))


def features_at(row):
    """For each row position the patches of the feature that it takes."""
    found = {}
    for batch in row.media:
        assert len(set(batch.keys)) == len(batch.keys) == len(batch.grid)
        assert len(batch.pixels) == batch.grid.prod(-1).sum()
        merged = batch.pixels[:, 0].view(-1, 4)
        pairs = zip(batch.positions.tolist(), merged[batch.features].tolist(), strict=True)
        found |= {position: (batch.kind, values) for position, values in pairs}
    return found


def check_sample(row, local, group, number):
    """What sample `local` sees and predicts in the row, against prompt + completion `number` on their own."""
    completion, prompt = list(group.completions[number]), len(group.prompt_ids)
    mine = row.owners == local
    assert row.targets[mine].tolist() == completion
    assert row.columns[mine].tolist() == list(range(len(completion)))
    expected = [*group.prompt_ids, *completion]
    answer = int(group.prompt_positions.max()) + 1 + torch.arange(len(completion))
    positions = torch.cat([group.prompt_positions, answer.repeat(3, 1)], dim=1)
    media_of = {
        int(place): (item.kind, item.pixels[4 * index : 4 * index + 4, 0].tolist())
        for item, places in zip(group.media, group.media_positions, strict=True)
        for index, place in enumerate(places)
    }
    seen, at = visible(row), features_at(row)
    for column, place in enumerate(row.predicted[mine].tolist()):
        keys = seen[place].nonzero()[:, 0]
        length = prompt + column
        assert row.ids[keys].tolist() == expected[:length]
        assert torch.equal(row.position_ids[:, keys], positions[:, :length])
        assert {index: at[key] for index, key in enumerate(keys.tolist()) if key in at} == media_of


@settings(max_examples=80, deadline=None)
@given(group_lists(), choices())
def test_every_completion_is_there_once_and_as_if_alone(groups, options):
    owner = {sample: (group, number) for group in groups for number, sample in enumerate(group.samples)}
    rows = pack(groups, cost=seconds, **options)
    assert sorted(sample for row in rows for sample in row.samples.tolist()) == sorted(owner)
    for row in rows:
        order = list(zip(row.owners.tolist(), row.columns.tolist(), strict=True))
        assert order == sorted(order)
        for local, sample in enumerate(row.samples.tolist()):
            check_sample(row, local, *owner[sample])


@settings(max_examples=80, deadline=None)
@given(group_lists(), choices())
def test_rows_keep_to_the_budget_and_repeat_no_prompt_without_need(groups, options):
    multiple, most, blank = options["multiple"], options["max_samples"], options["blank"]
    budget = max(multiple, options["max_tokens"] // multiple * multiple)
    rows = pack(groups, cost=seconds, **options)
    for row in rows:
        assert len(row.ids) % multiple == 0 and len(row.ids) - row.real_tokens < multiple
        assert len(row.ids) <= budget or len(row.samples) == 1
        assert most is None or len(row.samples) <= most
        assert row.real_tokens == int((row.document >= 0).sum())
        assert row.pairs == int(visible(row)[row.document >= 0].sum())
        assert row.longest == int(row.columns.max()) + 1
        assert row.media or blank is None
        assert row.ids[row.document < 0].eq(PAD).all() and visible(row).any(-1).all()
    prompt_tokens = 0
    for group in groups:
        holders = sum(not set(group.samples).isdisjoint(row.samples.tolist()) for row in rows)
        whole = group.tokens <= budget - (blank is not None) and (most is None or len(group.samples) <= most)
        assert holders == 1 or not whole
        prompt_tokens += holders * len(group.prompt_ids)
    blanks = sum(int(row.ids.eq(BLANK_ID).sum()) for row in rows)
    assert sum(row.real_tokens - len(row.targets) for row in rows) == prompt_tokens + blanks


def same(one, other):
    tensors = ("ids", "position_ids", "document", "segment", "predicted", "targets", "owners", "columns", "samples")
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in tensors)


@settings(max_examples=30, deadline=None)
@given(group_lists(), choices())
def test_the_same_groups_give_the_same_rows_the_longest_first(groups, options):
    rows, again = (pack(list(groups), cost=seconds, **options) for _ in range(2))
    assert len(rows) == len(again) and all(same(*pair) for pair in zip(rows, again, strict=True))
    order = [seconds(Load(row.real_tokens, row.pairs, len(row.targets), row.load.grids)) for row in rows]
    assert order == sorted(order, reverse=True)


@settings(max_examples=30, deadline=None)
@given(group_lists(), choices(), st.integers(0, 4))
def test_a_rank_gets_as_many_rows_as_it_asks_for(groups, options, more):
    needed = len(pack(groups, cost=seconds, **options))
    rows = pack(groups, cost=seconds, rows=needed + more, **options)
    assert len(rows) == needed + more
    assert sorted(s for row in rows for s in row.samples.tolist()) == [s for group in groups for s in group.samples]
    assert all(row.media for row in rows) or options["blank"] is None
    if needed:
        with pytest.raises(ValueError, match=f"rows={needed - 1} asked for, {needed} needed"):
            pack(groups, cost=seconds, rows=needed - 1, **options)


def group(prompt, lengths, first_sample=0, items=(), places=()):
    return PackGroup(
        prompt_ids=list(range(10, 10 + prompt)),
        prompt_positions=torch.arange(prompt).expand(3, -1),
        completions=[[100 + number] * length for number, length in enumerate(lengths)],
        samples=range(first_sample, first_sample + len(lengths)),
        media=tuple(items),
        media_positions=tuple(torch.tensor(place) for place in places),
        name="geo.parquet:7",
    )


def test_one_row_written_out():
    positions = torch.tensor([[0, 1, 1, 2], [0, 1, 1, 3], [0, 1, 2, 4]])
    first = PackGroup([5, 6, 7, 8], positions, [[9], [3, 4]], [4, 2])
    row = build_row([first, group(2, [1], 7)], multiple=4, pad_id=PAD)
    assert row.ids.tolist() == [5, 6, 7, 8, 9, 3, 4, 10, 11, 100, PAD, PAD]
    assert row.position_ids[2].tolist() == [0, 1, 2, 4, 5, 5, 6, 0, 1, 2, 0, 1]
    assert row.document.tolist() == [0] * 7 + [1] * 3 + [-1] * 2
    assert row.segment.tolist() == [0, 0, 0, 0, 1, 2, 2, 0, 0, 1, 0, 0]
    assert (row.document.dtype, row.segment.dtype) == (torch.int32, torch.int32)
    assert row.predicted.tolist() == [3, 3, 5, 8]  # the prompt's end once per completion
    assert row.targets.tolist() == [9, 3, 4, 100]
    assert (row.owners.tolist(), row.columns.tolist()) == ([0, 1, 1, 2], [0, 0, 1, 0])
    assert (row.samples.tolist(), row.longest, row.real_tokens, row.pairs) == ([4, 2, 7], 2, 10, 10 + 5 + 11 + 3 + 3)


def test_padded_scatters_scores_and_their_gradients():
    row = build_row([group(3, [2, 1]), group(2, [3], 2)])
    values = torch.arange(1.0, 7.0, requires_grad=True)
    padded = row.padded(values)
    assert padded.tolist() == [[1, 2, 0], [3, 0, 0], [4, 5, 6]]
    (padded * torch.arange(9.0).view(3, 3)).sum().backward()
    assert values.grad.tolist() == [0, 1, 3, 6, 7, 8]


def test_a_picture_of_two_groups_is_computed_once():
    picture, clip = POOL[1], POOL[3]
    one = group(6, [2], 0, [picture, clip], [[1, 2], [3, 5, 4, 0]])
    other = group(4, [1, 1], 1, [picture], [[0, 1]])
    images, videos = build_row([one, other]).media
    assert (images.kind, images.keys, len(images.pixels)) == ("image", ("b",), 8)
    assert (images.positions.tolist(), images.features.tolist()) == ([1, 2, 8, 9], [0, 1, 0, 1])
    assert (videos.kind, videos.positions.tolist(), videos.grid.tolist()) == ("video", [3, 5, 4, 0], [[2, 2, 4]])
    assert load_of([one, other]).grids == ((1, 4, 2), (2, 2, 4))


def test_to_moves_all_but_the_grids_and_casts_the_pixels_alone():
    row = build_row([group(4, [1], 0, [POOL[0]], [[1]])]).to("meta", torch.bfloat16)
    batch = row.media[0]
    moved = [row.ids, row.position_ids, row.document, row.segment, row.predicted, row.targets, row.owners, row.columns]
    moved += [row.samples, batch.pixels, batch.positions, batch.features]
    assert {values.device.type for values in moved} == {"meta"} and batch.grid.device.type == "cpu"
    assert (batch.pixels.dtype, row.ids.dtype) == (torch.bfloat16, torch.int64)


def test_a_blank_row_runs_the_tower_and_scores_nothing():
    (row,) = pack([], max_tokens=64, cost=seconds, rows=1, multiple=8, blank=BLANK)
    assert (row.ids[0], row.real_tokens, row.longest, len(row.targets), len(row.samples)) == (BLANK_ID, 1, 0, 0, 0)
    assert row.media[0].keys == ("blank",) and row.padded(torch.empty(0)).shape == (0, 0)
    assert pack([], max_tokens=64, cost=seconds, rows=1, pad_id=PAD)[0].ids.tolist() == [PAD]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": 0}, "geo.parquet:7: the prompt is empty"),
        (
            {"items": [POOL[2]], "places": [[0, 1]]},
            r"image 0 with grid \[1, 4, 6\] makes 6 features, the prompt has 2",
        ),
        ({"items": [POOL[0]]}, "geo.parquet:7: 1 media but 0 media_positions"),
        ({"items": [Media("x", "video", torch.zeros(3, 2), torch.tensor([1, 2, 2]))], "places": [[0]]}, "3 patches"),
    ],
)
def test_parts_that_disagree_are_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        group(**({"prompt": 4, "lengths": [1]} | changes))


def test_one_key_for_two_grids_is_refused():
    twin = Media("b", "image", POOL[0].pixels, POOL[0].grid)
    with pytest.raises(ValueError, match=r"'b' stands for two grids, \[1, 4, 2\] and \[1, 2, 2\]"):
        build_row([group(4, [1], 0, [POOL[1]], [[0, 1]]), group(4, [1], 1, [twin], [[0]])])


def test_geo3k_rows_are_full_and_even():
    """Pictures of real problems at the recipe's size, text at four letters a token, eight answers of about 300."""
    rule, numbers, groups = SizeRule(262144, 4194304, 28, 2, 3136, 12845056), random.Random(0), []
    for row in pq.read_table(GEO3K).to_pylist():
        image = Image.open(io.BytesIO(row["images"][0]["bytes"]))
        prompt = rule.tokens(*image.size) + len(row["problem"]) // 4 + 100
        lengths = [min(2048, int(numbers.lognormvariate(5.5, 0.6))) + 1 for _ in range(8)]
        groups.append(group(prompt, lengths, 8 * len(groups)))
    rows = pack(groups, max_tokens=16384, cost=seconds, multiple=128)
    processed, real = sum(len(row.ids) for row in rows), sum(row.real_tokens for row in rows)
    assert real == sum(part.tokens for part in groups)
    assert 1 - real / processed <= 0.05
    assert len(rows) == -(-real // 16384)
    times = [seconds(row.load) for row in rows]
    assert max(times) <= 1.03 * sum(times) / len(times)


def test_what_is_left_of_split_groups_shares_a_row():
    rows = pack([group(10, [10] * 6), group(10, [10] * 6, 6)], max_tokens=60, cost=seconds)
    assert sorted(row.real_tokens for row in rows) == [40, 60, 60]  # halves would take four rows of 40


def test_an_answer_without_tokens_fits_where_the_prompt_fills_the_budget():
    rows = pack([group(60, [0, 5])], max_tokens=60, cost=seconds)
    assert sorted(row.real_tokens for row in rows) == [60, 65]  # the longer one is over it by itself


# ---------------------------------------------------------------- bins


def heaviest(bins, costs):
    return max(sum(costs[item] for item in items) for items in bins)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 50), max_size=7), st.integers(1, 3))
def test_assign_is_close_to_the_best_of_all(costs, count):
    bins = assign(costs, count)
    assert len(bins) == count and sorted(item for items in bins for item in items) == list(range(len(costs)))
    best = min(
        max(sum(c for c, place in zip(costs, places, strict=True) if place == b) for b in range(count))
        for places in product(range(count), repeat=len(costs))
    )
    assert heaviest(bins, costs) <= (4 / 3 - 1 / (3 * max(1, count))) * best  # the differencing method's bound


def test_assign_finds_what_differencing_alone_does_not():
    costs = [8, 7, 6, 5, 4]  # 16 and 14 by differences
    assert heaviest(assign(costs, 2), costs) == 15


def test_assign_balances_a_batch_over_ranks():
    numbers = random.Random(0)
    costs = [numbers.lognormvariate(0, 0.5) for _ in range(64)]
    assert heaviest(assign(costs, 8), costs) <= 1.001 * sum(costs) / 8
    assert assign([1.0], 3).count([]) == 2


def test_bins_that_only_fit_first_fit_are_balanced_too():
    tokens = [9, 5, 2, 1]  # differencing puts three of them into one bin
    assert heaviest(fill(tokens, Limits(tokens=20, count=2)), tokens) == 10
    with pytest.raises(ValueError, match="item 0 with 9 tokens and count 1 is over the limits"):
        fill(tokens, Limits(tokens=8))
