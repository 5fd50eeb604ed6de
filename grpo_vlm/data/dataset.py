"""A data set of prompts: opens what the configuration names, checks every row before training, hands out Prompts by
index.

Rows are read lazily (parquet, folders and hub data sets stay memory-mapped), so a data set can be larger than memory
and cheap to give to DataLoader workers.
"""

import os
from collections.abc import Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from grpo_vlm.data.rows import Prompt, PromptBuilder, overlong_message
from grpo_vlm.data.sources import open_source
from grpo_vlm.errors import DataError

CHUNK_ROWS = 256  # rows in memory at a time while checking
LISTED_FAULTS = 10


@dataclass(frozen=True)
class DataReport:
    """What validate() found. rows: in the source; kept: indices of the usable rows, ascending.

    dropped_overlong: (row_id, tokens) of rows above data.max_prompt_length; longest: tokens of the longest kept
    prompt.
    """

    rows: int
    kept: tuple[int, ...]
    dropped_overlong: tuple[tuple[str, int], ...]
    longest: int


class PromptDataset:
    """Map-style data set of Prompts.

    source: "PATH[@split]" (parquet, json, jsonl, folder or hub id) or a list of row dicts; data_config: the `data`
    section; processor: a Qwen-VL processor.
    Raises DataError when the source cannot be read, is empty or lacks the question or answer column. Until validate()
    is called every row is in the set.
    """

    def __init__(self, source: str | Sequence[Mapping[str, Any]], data_config: Any, processor: Any):
        self.builder = PromptBuilder(data_config, processor)
        self.filter_overlong = data_config.filter_overlong_prompts
        self.workers = max(1, min(data_config.filter_overlong_prompts_workers, os.cpu_count() or 1))
        self.source = open_source(source)
        self._check_columns()
        self.kept: Sequence[int] = range(len(self.source))

    def __len__(self) -> int:
        return len(self.kept)

    def __getitem__(self, index: int) -> Prompt:
        """The Prompt of the index-th usable row. Raises DataError naming the row when it is faulty or too long."""
        return self.prompts([index])[0]

    def prompts(self, indices: Sequence[int]) -> list[Prompt]:
        """The Prompts of several usable rows. A picture that more than one of them shows is decoded and processed
        once, and its tensor shared. Raises DataError like []."""
        pictures = self.builder.pictures()
        return [self.builder.build(self._row(index), self.row_id(self.kept[index]), pictures) for index in indices]

    def picture_sources(self, index: int) -> list[Hashable]:
        """Equal for equal pictures of different rows, as far as can be seen without opening one."""
        return self.builder.picture_sources(self._row(index))

    def _row(self, index: int) -> dict[str, Any]:
        row = self.kept[index]
        return self.source.rows(row, row + 1)[0]

    def row_id(self, row: int) -> str:
        """Name of the row-th row of the source, counted before filtering."""
        return f"{self.source.name}:{row}"

    def select(self, rows: Sequence[int]) -> None:
        """Keeps exactly these rows of the source, in this order: how other ranks adopt the main process's report."""
        self.kept = tuple(rows)

    def validate(self) -> DataReport:
        """Checks all rows (columns, counts, every picture decoded, prompt length) and keeps the usable ones.

        Overlong prompts are dropped with data.filter_overlong_prompts, else they are faults. All faults are raised
        together in one DataError that lists the first ten and counts the rest; a data set with no row left is one,
        too.
        """
        faults: list[str] = []
        kept: list[int] = []
        dropped: list[tuple[str, int]] = []
        longest = 0
        limit = self.builder.max_prompt_length
        with ThreadPoolExecutor(self.workers) as pool:
            for start in range(0, len(self.source), CHUNK_ROWS):
                rows = self.source.rows(start, min(start + CHUNK_ROWS, len(self.source)))
                ids = [self.row_id(start + offset) for offset in range(len(rows))]
                for offset, sizes in enumerate(pool.map(self._sizes_or_fault, rows, ids)):
                    if isinstance(sizes, DataError):
                        faults.append(str(sizes))
                        continue
                    try:
                        tokens = self.builder.prompt_length(rows[offset], ids[offset], sizes)
                    except DataError as fault:
                        faults.append(str(fault))
                        continue
                    if tokens <= limit:
                        kept.append(start + offset)
                        longest = max(longest, tokens)
                    elif self.filter_overlong:
                        dropped.append((ids[offset], tokens))
                    else:
                        image_tokens = self.builder.image_tokens(sizes)
                        faults.append(overlong_message(ids[offset], tokens, image_tokens, limit))
        self._raise_faults(faults)
        if not kept:
            shortest = min(tokens for _, tokens in dropped)
            raise DataError(
                f"{self.source.name}: all {len(dropped)} prompts are longer than data.max_prompt_length={limit} "
                f"(the shortest has {shortest} tokens); raise it or lower data.max_pixels"
            )
        self.kept = tuple(kept)
        return DataReport(len(self.source), self.kept, tuple(dropped), longest)

    def _sizes_or_fault(self, row: Mapping[str, Any], row_id: str) -> list[tuple[int, int]] | DataError:
        try:
            return self.builder.picture_sizes(row, row_id)
        except DataError as fault:
            return fault

    def _raise_faults(self, faults: list[str]) -> None:
        if not faults:
            return
        listed = "\n".join(f"  {fault}" for fault in faults[:LISTED_FAULTS])
        more = f"\n  ... and {len(faults) - LISTED_FAULTS} more" if len(faults) > LISTED_FAULTS else ""
        raise DataError(f"{len(faults)} of {len(self.source)} rows cannot be used:\n{listed}{more}")

    def _check_columns(self) -> None:
        wanted = {"data.prompt_key": self.builder.prompt_key, "data.answer_key": self.builder.answer_key}
        missing = [f"{column!r} ({key})" for key, column in wanted.items() if column not in self.source.columns]
        if missing:
            raise DataError(
                f"{self.source.name}: missing column {' and '.join(missing)}; present: "
                f"{', '.join(self.source.columns)}; rename a column or set the key in brackets"
            )
