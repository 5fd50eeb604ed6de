"""Groups become packed rows: each prompt once, each picture once, no padding but at the row's end.

A row is a run of documents, one per group: the prompt, then its completions one after the other. Every completion
continues the positions of the prompt, sees the prompt and itself, and none of its siblings (model/attention.py), so
that a row scores exactly what a padded batch of prompt + completion would.

Shape legend: P prompt tokens, N tokens of a row, S scored (completion) tokens of a row, b completions in a row,
t longest completion of a row, M distinct media of a row, K placeholder tokens of a row.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain

import torch
from torch import Tensor

from grpo_vlm.model.balance import Limits, fill, first_fit

IMAGE, VIDEO = "image", "video"


@dataclass(frozen=True, eq=False)
class Media:
    """One processed image or video.

    key: hash of its content; equal keys in a row are computed once. kind: "image" or "video".
    pixels: [patches, dim]. grid: int64 [3] on the CPU, patches along time, height and width.
    merge_size: merge_size**2 patches become one feature, which takes one placeholder token.
    """

    key: str
    kind: str
    pixels: Tensor
    grid: Tensor
    merge_size: int = 2

    @property
    def features(self) -> int:
        return int(self.grid.prod()) // self.merge_size**2


@dataclass(frozen=True, eq=False)
class PackGroup:
    """A prompt and the completions that share it. Raises ValueError, naming the group, when the parts disagree.

    prompt_positions: int64 [3, P], the prompt's M-RoPE positions (thrice the same for a text model).
    samples: for each completion its row in the update's [B, T] tensors.
    media: in reading order. media_positions: for each of them the prompt positions [features] of its placeholders.
    name: what errors call the group, such as its row id.
    """

    prompt_ids: Sequence[int]
    prompt_positions: Tensor
    completions: Sequence[Sequence[int]]
    samples: Sequence[int]
    media: tuple[Media, ...] = ()
    media_positions: tuple[Tensor, ...] = ()
    name: str = "group"

    def __post_init__(self) -> None:
        length = len(self.prompt_ids)
        if length == 0:
            raise ValueError(f"{self.name}: the prompt is empty; a completion's first token is predicted at its end")
        if tuple(self.prompt_positions.shape) != (3, length):
            shape = list(self.prompt_positions.shape)
            raise ValueError(f"{self.name}: prompt_positions must be [3, {length}], one per prompt token; got {shape}")
        if len(self.samples) != len(self.completions):
            raise ValueError(
                f"{self.name}: {len(self.completions)} completions but {len(self.samples)} sample numbers"
            )
        if len(self.media) != len(self.media_positions):
            raise ValueError(f"{self.name}: {len(self.media)} media but {len(self.media_positions)} media_positions")
        for number, (media, positions) in enumerate(zip(self.media, self.media_positions, strict=True)):
            if media.features != len(positions):
                raise ValueError(
                    f"{self.name}: {media.kind} {number} with grid {media.grid.tolist()} makes {media.features} "
                    f"features, the prompt has {len(positions)} placeholders for it; process and expand it at one size"
                )
            if len(media.pixels) != int(media.grid.prod()):
                raise ValueError(
                    f"{self.name}: {media.kind} {number} has {len(media.pixels)} patches, its grid "
                    f"{media.grid.tolist()} says {int(media.grid.prod())}"
                )

    @property
    def tokens(self) -> int:
        return len(self.prompt_ids) + sum(len(completion) for completion in self.completions)

    def part(self, numbers: Sequence[int]) -> "PackGroup":
        """The same prompt with only these completions."""
        return replace(
            self,
            completions=[self.completions[number] for number in numbers],
            samples=[self.samples[number] for number in numbers],
        )


@dataclass(frozen=True)
class Load:
    """What a row asks of the machine, for model/cost.py.

    tokens: through the text layers, padding included once the row is built. pairs: attended query-key pairs of real
    tokens. scored: tokens through the head. grids: patches (time, height, width) of each distinct image or video.
    """

    tokens: int = 0
    pairs: int = 0
    scored: int = 0
    grids: tuple[tuple[int, int, int], ...] = ()


@dataclass(frozen=True, eq=False)
class MediaBatch:
    """All images, or all videos, of a row.

    keys: of the M distinct items. pixels: [patches, dim] of these items one after the other. grid: int64 [M, 3],
    always on the CPU. positions: int64 [K], the row positions that take a feature. features: int64 [K], for each of
    them the index into the items' merged features one after the other; an item that two groups show is pointed at
    twice.
    """

    kind: str
    keys: tuple[str, ...]
    pixels: Tensor
    grid: Tensor
    positions: Tensor
    features: Tensor

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> "MediaBatch":
        pixels = self.pixels if dtype is None else self.pixels.to(dtype)
        return replace(
            self,
            pixels=move(pixels, device),
            positions=move(self.positions, device),
            features=move(self.features, device),
        )


@dataclass(frozen=True, eq=False)
class PackedRow:
    """One forward pass. Index tensors are int64 unless said otherwise.

    ids [N]; position_ids [3, N]; document int32 [N], number of the group in the row, -1 at padding; segment int32 [N],
    0 at the prompt and i + 1 at completion i.
    predicted [S]: row position whose hidden state predicts the token; the prompt's last position appears once per
    completion. targets [S]: the tokens. owners [S]: local sample 0..b-1. columns [S]: index in the completion. All
    four are ordered by owner, then column.
    samples [b]: for each local sample its row in the update's tensors. longest: t.
    real_tokens: N without padding. pairs: query-key pairs that attention has to compute, padding left out.
    """

    ids: Tensor
    position_ids: Tensor
    document: Tensor
    segment: Tensor
    predicted: Tensor
    targets: Tensor
    owners: Tensor
    columns: Tensor
    samples: Tensor
    longest: int
    media: tuple[MediaBatch, ...]
    real_tokens: int
    pairs: int

    @property
    def load(self) -> Load:
        grids = tuple(tuple(grid) for batch in self.media for grid in batch.grid.tolist())
        return Load(tokens=len(self.ids), pairs=self.pairs, scored=len(self.targets), grids=grids)

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> "PackedRow":
        """The row on `device`, its pixels in `dtype`; grids stay on the CPU. Does not wait for the copies."""
        moved = {
            f.name: move(value, device) for f in fields(self) if isinstance(value := self.__dict__[f.name], Tensor)
        }
        return replace(self, **moved, media=tuple(batch.to(device, dtype) for batch in self.media))

    def padded(self, values: Tensor) -> Tensor:
        """[S] to [b, t], zero where a completion has no token. Differentiable."""
        shape = (len(self.samples), self.longest)
        return values.new_zeros(shape).index_put((self.owners, self.columns), values)


def move(values: Tensor, device: torch.device | str) -> Tensor:
    """`values` on `device`, through pinned memory to CUDA, without waiting for the copy."""
    pin = torch.device(device).type == "cuda" and values.device.type == "cpu"
    return (values.pin_memory() if pin else values).to(device, non_blocking=True)


# ---------------------------------------------------------------- building rows


def build_row(groups: Sequence[PackGroup], *, multiple: int = 1, pad_id: int = 0) -> PackedRow:
    """One row of these groups, in this order, padded with `pad_id` to a multiple of `multiple` tokens."""
    parts: dict[str, list[Tensor]] = {name: [] for name in ("ids", "position_ids", "document", "segment")}
    scored: dict[str, list[Tensor]] = {name: [] for name in ("predicted", "targets", "owners", "columns")}
    samples: list[int] = []
    start = 0
    for number, group in enumerate(groups):
        _append_group(parts, scored, group, number, start, len(samples))
        samples += group.samples
        start += group.tokens
    padding = -start % multiple
    if padding:
        parts["ids"].append(torch.full((padding,), pad_id))
        parts["position_ids"].append(torch.arange(padding).expand(3, padding))
        parts["document"].append(torch.full((padding,), -1, dtype=torch.int32))
        parts["segment"].append(torch.zeros(padding, dtype=torch.int32))
    load = load_of(groups)
    return PackedRow(
        **{name: torch.cat(values, dim=-1) for name, values in (parts | scored).items()},
        samples=torch.tensor(samples, dtype=torch.long),
        longest=max((len(completion) for group in groups for completion in group.completions), default=0),
        media=_media_batches(groups),
        real_tokens=load.tokens,
        pairs=load.pairs,
    )


def _append_group(
    parts: dict[str, list[Tensor]],
    scored: dict[str, list[Tensor]],
    group: PackGroup,
    number: int,
    start: int,
    first_owner: int,
) -> None:
    prompt = len(group.prompt_ids)
    lengths = torch.tensor([len(completion) for completion in group.completions], dtype=torch.long)
    answers = torch.tensor(list(chain.from_iterable(group.completions)), dtype=torch.long)  # [s], all of this group
    completion = torch.arange(len(lengths)).repeat_interleave(lengths)
    column = torch.arange(len(answers)) - (lengths.cumsum(0) - lengths)[completion]
    position = column + int(group.prompt_positions.max()) + 1  # M-RoPE: on from the largest of the three axes
    parts["ids"] += [torch.as_tensor(group.prompt_ids, dtype=torch.long), answers]
    parts["position_ids"] += [group.prompt_positions, position.expand(3, -1)]
    parts["document"].append(torch.full((prompt + len(answers),), number, dtype=torch.int32))
    parts["segment"] += [torch.zeros(prompt, dtype=torch.int32), (completion + 1).int()]
    before = torch.arange(len(answers)) + start + prompt - 1
    scored["predicted"].append(torch.where(column == 0, start + prompt - 1, before))
    scored["targets"].append(answers)
    scored["owners"].append(completion + first_owner)
    scored["columns"].append(column)


def _media_batches(groups: Sequence[PackGroup]) -> tuple[MediaBatch, ...]:
    return tuple(batch for kind in (IMAGE, VIDEO) if (batch := _media_batch(groups, kind)) is not None)


def _media_batch(groups: Sequence[PackGroup], kind: str) -> MediaBatch | None:
    items: dict[str, Media] = {}
    first_feature: dict[str, int] = {}
    made, start = 0, 0
    positions, features = [], []
    for group in groups:
        for media, places in zip(group.media, group.media_positions, strict=True):
            if media.kind != kind:
                continue
            if media.key not in items:
                items[media.key], first_feature[media.key] = media, made
                made += media.features
            elif not torch.equal(items[media.key].grid, media.grid):
                grids = items[media.key].grid.tolist(), media.grid.tolist()
                raise ValueError(
                    f"{group.name}: {kind} key {media.key!r} stands for two grids, {grids[0]} and {grids[1]}"
                )
            positions.append(places + start)
            features.append(torch.arange(media.features) + first_feature[media.key])
        start += group.tokens
    if not items:
        return None
    return MediaBatch(
        kind=kind,
        keys=tuple(items),
        pixels=torch.cat([media.pixels for media in items.values()]),
        grid=torch.stack([media.grid for media in items.values()]),
        positions=torch.cat(positions),
        features=torch.cat(features),
    )


def load_of(groups: Iterable[PackGroup]) -> Load:
    """The load of a row of these groups, before padding."""
    tokens = pairs = scored = 0
    grids: dict[tuple[str, str], tuple[int, int, int]] = {}
    for group in groups:
        prompt, lengths = len(group.prompt_ids), [len(completion) for completion in group.completions]
        tokens += prompt + sum(lengths)
        scored += sum(lengths)
        pairs += prompt * (prompt + 1) // 2 + sum(n * prompt + n * (n + 1) // 2 for n in lengths)
        grids |= {(media.kind, media.key): tuple(media.grid.tolist()) for media in group.media}
    return Load(tokens, pairs, scored, tuple(grids.values()))


def blank_group(media: Media | None, token_id: int) -> PackGroup:
    """A document that nobody scores: the placeholders of a smallest picture, or one token without `media`.

    A row of it alone is a blank row (S = b = 0), for a rank that has fewer rows than the others; added to a row
    without pictures it makes the vision tower run there. DDP, ZeRO-3 and FSDP wait for both.
    """
    length = 1 if media is None else media.features
    return PackGroup(
        prompt_ids=[token_id] * length,
        prompt_positions=torch.arange(length).repeat(3, 1),
        completions=(),
        samples=(),
        media=() if media is None else (media,),
        media_positions=() if media is None else (torch.arange(length),),
        name="blank group",
    )


# ---------------------------------------------------------------- choosing rows


def pack(
    groups: Sequence[PackGroup],
    *,
    max_tokens: int,
    cost: Callable[[Load], float],
    max_samples: int | None = None,
    multiple: int = 1,
    rows: int | None = None,
    pad_id: int = 0,
    blank: PackGroup | None = None,
) -> list[PackedRow]:
    """Rows of these groups, the one with the longest predicted time first. The same arguments give the same rows.

    max_tokens: a row's budget, padding to `multiple` included; below `multiple` it counts as `multiple`. max_samples:
    most completions in a row. A group over either is split, its prompt repeated; one completion that is over the
    budget with its prompt gets a row of its own.
    cost: predicted seconds of a load (model/cost.py). The fewest rows that hold everything are balanced by it.
    rows: exactly so many; those that find no group hold `blank`, or one token when it is None. Raises ValueError when
    more are needed.
    blank: a `blank_group` with a picture, which every row without pictures gets.
    """
    budget = max(multiple, max_tokens // multiple * multiple) - (0 if blank is None else blank.tokens)
    plan = _plan(groups, Limits(budget, max_samples), cost, rows)
    filler = blank_group(None, pad_id) if blank is None else blank
    plan = [row or [filler] for row in plan]
    if blank is not None:
        plan = [row if any(group.media for group in row) else [*row, blank] for row in plan]
    plan.sort(key=lambda row: -cost(load_of(row)))
    return [build_row(row, multiple=multiple, pad_id=pad_id) for row in plan]


def _plan(
    groups: Sequence[PackGroup], limits: Limits, cost: Callable[[Load], float], rows: int | None
) -> list[list[PackGroup]]:
    """The groups, or their pieces, of each row; empty for rows that find none."""
    fixed = cost(Load())

    def place(pieces: Sequence[PackGroup], alone: Sequence[PackGroup], count: int | None) -> list[list[PackGroup]]:
        bins = fill(
            [piece.tokens for piece in pieces],
            limits,
            costs=[cost(load_of([piece])) - fixed for piece in pieces],
            counts=[len(piece.completions) for piece in pieces],
            bins=None if count is None else count - len(alone),
        )
        return [[pieces[number] for number in numbers] for numbers in bins] + [[piece] for piece in alone]

    pieces, alone = _pieces(groups, limits, even=True)
    plan = place(pieces, alone, None)
    if len(pieces) + len(alone) > len(groups):
        others = _pieces(groups, limits, even=False)
        if len(other := place(*others, None)) < len(plan):
            (pieces, alone), plan = others, other
    if rows is None or rows == len(plan):
        return plan
    if rows < len(plan):
        raise ValueError(f"rows={rows} asked for, {len(plan)} needed for {len(groups)} groups; raise max_tokens")
    return place(pieces, alone, rows)


def _pieces(groups: Sequence[PackGroup], limits: Limits, even: bool) -> tuple[list[PackGroup], list[PackGroup]]:
    """The groups, split where they are over a limit, and the single completions that are over it by themselves.

    even: parts of equal length, best when each gets a row of its own; otherwise full parts and a rest, which may share
    a row with another's rest.
    """
    pieces, alone = [], []
    for group in groups:
        if group.tokens <= limits.tokens and (limits.count is None or len(group.completions) <= limits.count):
            pieces.append(group)
            continue
        lengths = [len(completion) for completion in group.completions]
        room = Limits(limits.tokens - len(group.prompt_ids), limits.count)
        long = [number for number, length in enumerate(lengths) if length > room.tokens]
        short = [number for number, length in enumerate(lengths) if length <= room.tokens]
        alone += [group.part([number]) for number in long]
        parts = (fill if even else first_fit)([lengths[number] for number in short], room)
        pieces += [group.part([short[number] for number in part]) for part in parts]
    return pieces, alone
