"""Which groups of a step are shown in full, made ready on the process that has their pictures."""

from collections import defaultdict
from collections.abc import Sequence

from accelerate.utils import gather_object
from PIL import Image

from grpo_vlm.data.rows import Prompt
from grpo_vlm.report.groups import MAX_PICTURES, Answer, ShownGroup, Thumbnail, flatten, pick, thumbnail, widest
from grpo_vlm.training.batch import Group
from grpo_vlm.training.observe import Placed


def show(ranks: Sequence[Sequence[Placed]], groups: Sequence[Group]) -> list[ShownGroup]:
    """A few groups of a step, in the order of their places.

    ranks: the samples of every process, the same list on each; groups: those of this process. Collective when there
    are several processes: every process picks the same places and those that have a picked group make it ready.
    """
    rows: dict[int, list[Placed]] = defaultdict(list)
    for row in (row for rank in ranks for row in rank):
        rows[row.place].append(row)
    places = sorted(rows)
    scores = [[row.scored.reward for row in rows[place] if row.scored.sample.scores] for place in places]
    reasons = {places[number]: why for number, why in pick(scores).items()}
    mine = [
        (group.index, _shown(group, rows[group.index], reasons[group.index]))
        for group in groups
        if group.index in reasons
    ]
    found = gather_object(mine) if len(ranks) > 1 else mine
    return [group for _, group in sorted(found, key=lambda item: item[0])]


def _shown(group: Group, rows: Sequence[Placed], why: str) -> ShownGroup:
    counted = group.counted or (True,) * len(group.completions)
    first = rows[0].scored.sample
    return ShownGroup(
        step=first.step,
        split=first.split,
        row_id=first.row_id,
        why=why,
        question=flatten(group.prompt.messages),
        ground_truth=first.ground_truth,
        answers=widest(
            [
                Answer.of(row.scored.sample, row.scored.reward, counted=flag)
                for row, flag in zip(rows, counted, strict=True)
            ]
        ),
        pictures=_thumbnails(group.prompt),
    )


def _thumbnails(prompt: Prompt) -> tuple[Thumbnail, ...]:
    """The first pictures of a prompt, then frames of its videos, evenly spaced."""
    shown = [thumbnail(image, key) for image, key in zip(prompt.images, prompt.image_keys, strict=True)]
    for clip in prompt.videos[: MAX_PICTURES - len(shown)]:
        for place in range(0, len(clip.frames), max(1, len(clip.frames) // MAX_PICTURES)):
            shown.append(thumbnail(Image.fromarray(clip.frames[place]), f"{clip.key}-{place}"))
    return tuple(shown[:MAX_PICTURES])
