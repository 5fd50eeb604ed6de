"""The videos of TinyLLaVA-Video-R1 (hub: Zhang199/TinyLLaVA-Video-R1-training-data): NextQA clips of up to 30 seconds
with a question and lettered options. One part, of which a tenth is held out.

The raw folder holds nextqa_0-30s.jsonl and the unpacked NextQA.zip. Videos are not copied: rows name them.
"""

import zipfile
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download

from grpo_vlm.config.locations import scheme_of
from grpo_vlm.data.prepared import THINK_LETTER, Task, cell, each_row, ninety_ten
from grpo_vlm.data.row_sources import RowSource
from grpo_vlm.data.schemas import ANSWER_TAG
from grpo_vlm.data.sources import open_source
from grpo_vlm.errors import DataError
from grpo_vlm.hub import data_folder, uses_modelscope

HELP = "TinyLLaVA-Video-R1: questions about short videos"
HUB_ID = "Zhang199/TinyLLaVA-Video-R1-training-data"
ROWS, ARCHIVE = "nextqa_0-30s.jsonl", "NextQA.zip"
TASK = Task(HUB_ID, "video_qa", THINK_LETTER, media="videos", joint="\n\n")


def add_arguments(parser: ArgumentParser) -> None:
    """verl's flags of this set."""
    parser.add_argument("--data_dir", dest="local_dataset_path", help="verl's name of --local_dataset_path")
    parser.add_argument("--video_fps", type=float, default=1.0, help="frames a second to take (default 1)")
    parser.add_argument("--video_max_frames", type=int, default=32, help="most frames to take (default 32)")


def splits(options: Namespace) -> dict[str, Iterator[dict[str, Any]]]:
    """90 % train, 10 % test, seed 42. Raises DataError when videos are absent."""
    folder = _folder(options)
    if not (folder / ROWS).is_file():
        raise DataError(f"{folder} holds no {ROWS}; name the folder that does by --local_dataset_path")
    source = open_source(str(folder / ROWS))
    absent = [
        f"{row_id}: {path}"
        for _, row_id, row in each_row(source)
        if not (path := _video(row, row_id, folder)).is_file()
    ]
    if absent:
        raise DataError(
            f"{len(absent)} of {len(source)} videos are not there, the first: {absent[0]}; unpack {ARCHIVE} in "
            f"{folder}"
        )
    return {name: _rows(source, name, numbers, folder, options) for name, numbers in ninety_ten(len(source)).items()}


def _folder(options: Namespace) -> Path:
    """The raw folder; downloaded and unpacked beside the result when none is named."""
    if options.local_dataset_path:
        return Path(options.local_dataset_path).expanduser().absolute()
    if uses_modelscope():
        folder = data_folder(HUB_ID)
    elif scheme_of(options.out):
        raise DataError(
            f"{options.out}: videos cannot be unpacked there; download {HUB_ID} and name its folder by "
            "--local_dataset_path"
        )
    else:
        folder = Path(options.out).expanduser().absolute() / "raw"
        try:
            snapshot_download(HUB_ID, repo_type="dataset", local_dir=folder, allow_patterns=[ROWS, ARCHIVE])
        except Exception as error:  # no network, no such set: whatever the client raises
            reason = " ".join(str(error).split())[:300]
            raise DataError(
                f"{HUB_ID} cannot be downloaded: {type(error).__name__}: {reason}; download it elsewhere and name its "
                "folder by --local_dataset_path"
            ) from error
    if not (folder / "NextQA").is_dir() and (folder / ARCHIVE).is_file():
        with zipfile.ZipFile(folder / ARCHIVE) as archive:
            archive.extractall(folder)
    return folder


def _video(row: dict[str, Any], row_id: str, folder: Path) -> Path:
    return folder / cell(row, row_id, "video_filename").removeprefix("./")


def _rows(
    source: RowSource, split: str, numbers: Iterable[int], folder: Path, options: Namespace
) -> Iterator[dict[str, Any]]:
    for index, row_id, row in each_row(source, numbers):
        solution, path = cell(row, row_id, "solution"), str(_video(row, row_id, folder))
        tagged = ANSWER_TAG.search(solution)
        yield TASK.row(
            split=split,
            index=index,
            problem="<video>\n" + cell(row, row_id, "problem"),
            media=[{"video": path, "fps": options.video_fps, "max_frames": options.video_max_frames}],
            answer=tagged[1].strip() if tagged else solution,
            truth=solution,
            video_path=path,
        )
