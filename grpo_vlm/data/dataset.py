"""A data set of prompts: opens what the configuration names, checks every row before training, hands out Prompts by
index.

Rows are read when they are needed, so a data set can be larger than memory and is cheap to give to workers.
"""

import os
import re
import shlex
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_vlm.data.cache import short_hash
from grpo_vlm.data.lengths import Scan, cached_scan
from grpo_vlm.data.row_sources import parts_of
from grpo_vlm.data.rows import Prompt, PromptBuilder, overlong_message
from grpo_vlm.data.schemas import Schema
from grpo_vlm.data.sources import open_source
from grpo_vlm.errors import DataError

LISTED_FAULTS = 10
NAMED_ROWS = 3  # in a note about many
LIKE_MEDIA = re.compile(r"image|img|pic|photo|figure|video|clip|frame", re.IGNORECASE)  # in a column's name
FIRST_ROWS = 8  # that tell the shape of a source


@dataclass(frozen=True)
class DataReport:
    """What validate() found. rows: in the source; kept: indices of the usable rows, ascending.

    dropped_overlong: (row_id, tokens) of rows above data.max_prompt_length; longest: tokens of the longest kept
    prompt. skipped: (row_id, what is wrong) of rows left out by data.on_bad_media=skip. cached: the lengths come from
    an earlier run. notes: what the user should know.
    """

    rows: int
    kept: tuple[int, ...]
    dropped_overlong: tuple[tuple[str, int], ...]
    longest: int
    skipped: tuple[tuple[str, str], ...] = ()
    cached: bool = False
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """Where each row goes; together they are all rows. kept: row numbers; the others are (row_id, tokens) or (row_id,
    what is wrong). unanswered: row numbers of those kept that have no right answer."""

    kept: tuple[int, ...]
    overlong: tuple[tuple[str, int], ...]
    skipped: tuple[tuple[str, str], ...]
    faults: tuple[tuple[str, str], ...]
    unanswered: tuple[int, ...]

    def answer_note(self, row_id: Callable[[int], str]) -> str:
        """What the user should know of rows without a right answer; "" where there is none."""
        if not self.unanswered:
            return ""
        some = ", ".join(map(row_id, self.unanswered[:NAMED_ROWS]))
        more = ", ..." if len(self.unanswered) > NAMED_ROWS else ""
        return (
            f"{len(self.unanswered)} of {len(self.kept)} rows have no right answer ({some}{more}): the reward gets an "
            "empty ground_truth; data.answer_key names the column that has it"
        )


class PromptDataset:
    """Map-style data set of Prompts.

    source: "PATH[@split]" (parquet, json, jsonl, folder, URL or hub id), several of them with commas between, or a
    list of row dicts; data_config: the `data` section; processor: a Qwen-VL processor.
    mark: of the rows that validate() kept: another where a resumed run would draw other rows.
    Raises DataError when the source cannot be read, is empty or lacks the question or answer column. Until validate()
    is called every row is in the set.
    """

    def __init__(self, source: str | Sequence[Mapping[str, Any]], data_config: Any, processor: Any):
        self.settings = data_config
        self.workers = max(1, min(data_config.filter_overlong_prompts_workers, os.cpu_count() or 1))
        self.builder = PromptBuilder(data_config, processor)
        self.source = open_source(source)
        self._named = source if isinstance(source, str) else None
        self._check_columns()
        self.kept: Sequence[int] = range(len(self.source))
        self.mark = ""

    def __len__(self) -> int:
        return len(self.kept)

    def __getitem__(self, index: int) -> Prompt:
        """The Prompt of the index-th usable row. Raises DataError naming the row when it is faulty or too long."""
        return self.prompts([index])[0]

    def prompts(self, indices: Sequence[int]) -> list[Prompt]:
        """The Prompts of several usable rows. A picture that more than one of them shows is decoded and processed
        once, and its tensor shared. Raises DataError like []."""
        pictures = self.builder.pictures()
        built: dict[int, Prompt] = {}
        for index, row in self._rows(indices):
            built[index] = self.builder.build(row, self.row_id(self.kept[index]), pictures)
        return [built[index] for index in indices]

    def answers(self) -> Iterator[tuple[str, str]]:
        """Row id and gold answer of every usable row, in the order of the source; no picture is opened."""
        kept, row = set(self.kept), 0
        for batch in self.source.batches():
            for values in batch:
                if row in kept:
                    yield self.row_id(row), self.builder.answer(values, self.row_id(row))
                row += 1

    def picture_sources(self, indices: Sequence[int]) -> dict[int, list[Hashable]]:
        """For each usable row what its pictures are known by: equal for equal pictures of different rows, as far as
        can be seen without opening one."""
        builder, kept = self.builder, self.kept
        found = {index: builder.picture_sources(row, self.row_id(kept[index])) for index, row in self._rows(indices)}
        return {index: found[index] for index in indices}

    def _rows(self, indices: Sequence[int]) -> Iterator[tuple[int, dict[str, Any]]]:
        """Each index once with its row, in the order of the source: neighbours are read together."""
        for index in sorted(dict.fromkeys(indices), key=self.kept.__getitem__):
            yield index, self.source.rows(self.kept[index], self.kept[index] + 1)[0]

    @property
    def schemas(self) -> dict[str, Schema]:
        """The shape of each part of the source, by its name."""
        return self.builder.schemas

    def row_id(self, row: int) -> str:
        """Name of the row-th row of the source, counted before filtering."""
        return self.source.row_id(row)

    def select(self, rows: Sequence[int]) -> None:
        """Keeps exactly these rows of the source, in this order: how other ranks adopt the main process's report."""
        self.kept = tuple(rows)

    def validate(self) -> DataReport:
        """Checks all rows (columns, counts, every picture decoded, prompt length) and keeps the usable ones. What an
        earlier run found about the same rows is taken from the cache.

        Overlong prompts are dropped with data.filter_overlong_prompts, rows with a bad picture or video with
        data.on_bad_media=skip; else they are faults. All faults are raised together in one DataError that lists the
        first ten and counts the rest; a data set with no row left is one, too.
        """
        scan, note = cached_scan(self.source, self.builder, self.settings, self.workers)
        return self.adopt(scan, [*self.source.notes, *([note] if note else [])])

    def adopt(self, scan: Scan, notes: Sequence[str] = ()) -> DataReport:
        """Keeps the rows that a scan found usable. Raises DataError like validate()."""
        verdict, limit = self.judge(scan), self.settings.max_prompt_length
        self._raise_faults([text for _, text in verdict.faults])
        if not verdict.kept and not verdict.overlong:
            first = verdict.skipped[0][1]
            raise DataError(f"all {len(verdict.skipped)} rows have media that cannot be used; the first: {first}")
        if not verdict.kept:
            shortest = min(tokens for _, tokens in verdict.overlong)
            raise DataError(
                f"{self.source.name}: all {len(verdict.overlong)} prompts are longer than data.max_prompt_length="
                f"{limit} (the shortest has {shortest} tokens); raise it or lower data.max_pixels"
            )
        self.kept = verdict.kept
        self.mark = f"{len(self.kept)} of {len(self.source)} rows, {short_hash(scan.content, str(self.kept))}"
        notes = [*notes, *filter(None, [verdict.answer_note(self.row_id), self.media_note(scan)])]
        longest = max(scan.tokens[row] for row in self.kept)
        return DataReport(
            len(self.source), self.kept, verdict.overlong, longest, verdict.skipped, scan.cached, tuple(notes)
        )

    def media_note(self, scan: Scan) -> str:
        """That no row shows anything while a column sounds like media; "" where all is well."""
        passed = [name for name in self.source.columns if LIKE_MEDIA.search(name)]
        if any(scan.media_tokens) or scan.faults or not passed:
            return ""
        return (
            f"no row shows a picture or a video; the columns are {', '.join(self.source.columns)}, and "
            f"{' or '.join(passed)} may be meant: data.image_key and data.video_key name theirs"
        )

    def judge(self, scan: Scan) -> Verdict:
        """What becomes of each row under data.max_prompt_length, filter_overlong_prompts and on_bad_media."""
        limit, filtering = self.settings.max_prompt_length, self.settings.filter_overlong_prompts
        kept, overlong, skipped, faults = [], [], [], []
        for row, tokens in enumerate(scan.tokens):
            if row in scan.faults:
                text, media = scan.faults[row]
                (skipped if media and self.builder.skip_bad_media else faults).append((self.row_id(row), text))
            elif tokens <= limit:
                kept.append(row)
            elif filtering:
                overlong.append((self.row_id(row), tokens))
            else:
                text = overlong_message(self.row_id(row), tokens, scan.media_tokens[row], limit)
                faults.append((self.row_id(row), text))
        usable = set(kept)
        unanswered = tuple(row for row in scan.unanswered if row in usable)
        return Verdict(tuple(kept), tuple(overlong), tuple(skipped), tuple(faults), unanswered)

    def _raise_faults(self, faults: list[str]) -> None:
        if not faults:
            return
        listed = "\n".join(f"  {fault}" for fault in faults[:LISTED_FAULTS])
        more = f"\n  ... and {len(faults) - LISTED_FAULTS} more" if len(faults) > LISTED_FAULTS else ""
        if more and self._named:
            more += f"; `grpo-vlm data check {shlex.quote(self._named)}` lists them all"
        raise DataError(f"{len(faults)} of {len(self.source)} rows cannot be used:\n{listed}{more}")

    def _check_columns(self) -> None:
        for part in parts_of(self.source):
            try:
                self.builder.learn(part.name, part.columns, part.rows(0, min(FIRST_ROWS, len(part))))
            except DataError as error:
                raise DataError(f"{part.name}: {error}") from None
