"""How long every prompt is, and what is wrong with the rows: one pass over all of them before training, kept in the
cache.

An entry is found by the content of the data file, the tokenizer, the templates, the processor's sizes, the keys of the
data section, the code that counts and the libraries it stands on; the files that rows name are looked at each time.
What is not known to be the same is counted again.
"""

import dataclasses
import hashlib
import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from grpo_vlm.data.cache import cache_dir, file_state, short_hash, write_entry
from grpo_vlm.data.row_sources import RowSource
from grpo_vlm.data.rows import PromptBuilder
from grpo_vlm.errors import DataError, MediaError

LIBRARIES = ("transformers", "tokenizers", "pillow", "qwen-vl-utils", "av", "torchcodec")
ELSEWHERE = frozenset(  # keys of the data section that no length depends on, or whose content is hashed instead
    "train_files val_files max_prompt_length max_response_length rollout_batch_size mini_rollout_batch_size "
    "val_batch_size shuffle seed filter_overlong_prompts filter_overlong_prompts_workers num_workers on_bad_media "
    "format_prompt override_chat_template".split()
)


@dataclass
class Scan:
    """What a pass over all rows found. tokens, media_tokens: of each row's prompt after expansion, 0 for a faulty row.

    faults: row -> (what is wrong, whether it is a picture or video that is). files: state of each file that rows name.
    animated: ids of rows with a moving picture. unanswered: sound rows without a right answer. content: the source's
    digest, "" where it has none.
    """

    tokens: list[int] = field(default_factory=list)
    media_tokens: list[int] = field(default_factory=list)
    faults: dict[int, tuple[str, bool]] = field(default_factory=dict)
    files: list[list[int | str]] = field(default_factory=list)
    animated: list[str] = field(default_factory=list)
    unanswered: list[int] = field(default_factory=list)
    content: str = ""
    cached: bool = False


Watch = Callable[[int, Mapping[str, Any], Any], None]  # row number, row, sizes of its media


def scan_rows(source: RowSource, builder: PromptBuilder, workers: int, watch: Watch | None = None) -> Scan:
    """Measures every row: media decoded in `workers` threads (decoders leave Python's lock), text in this one, while
    the threads have the next rows. watch: called with each sound row."""
    scan = Scan()
    files: dict[str, list[int | str]] = {}
    with ThreadPoolExecutor(workers) as pool:
        for number, (row_id, row, media) in enumerate(_measured(source, builder, pool)):
            tokens, media_tokens = 0, 0
            try:
                sizes, named = media.result()
                files = named | files
                if isinstance(sizes, DataError):
                    raise sizes
                tokens = builder.prompt_length(row, row_id, sizes)
                media_tokens = builder.image_tokens(sizes)
                if not builder.answer(row, row_id):
                    scan.unanswered.append(number)
            except DataError as fault:
                scan.faults[number] = str(fault), isinstance(fault, MediaError)
            else:
                if watch is not None:
                    watch(number, row, sizes)
            scan.tokens.append(tokens)
            scan.media_tokens.append(media_tokens)
    scan.files = [files[file] for file in sorted(files)]
    scan.animated = sorted(builder.animated)
    return scan


def cached_scan(source: RowSource, builder: PromptBuilder, settings: Any, workers: int) -> tuple[Scan, str]:
    """A scan of the cache, or a new one that is put there; and what the user should know about the cache, mostly
    nothing. settings: the data section."""
    content = source.digest()
    path = _entry(content, source.name, builder, settings)
    found = None if path is None else _read(path, len(source))
    if found is not None:
        builder.animated |= set(found.animated)
        return found, ""
    scan = scan_rows(source, builder, workers)
    scan.content = content or ""
    if path is None:
        return scan, ""
    try:
        _write(path, scan)
    except OSError as error:
        folder = path.parent
        return scan, f"prompt lengths are counted again in each run: {folder} cannot be written ({error.strerror})"
    return scan, ""


def _measured(
    source: RowSource, builder: PromptBuilder, pool: ThreadPoolExecutor
) -> Iterator[tuple[str, dict[str, Any], Future]]:
    """Row id, row and the sizes of its media to come; the next batch is under way while one is used."""
    waiting: deque[list[tuple[str, dict[str, Any], Future]]] = deque()
    start = 0
    for rows in source.batches():
        batch = []
        for number, row in enumerate(rows, start):
            row_id = source.row_id(number)
            batch.append((row_id, row, pool.submit(_measure, builder, row, row_id)))
        start += len(rows)
        waiting.append(batch)
        if len(waiting) > 1:
            yield from waiting.popleft()
    for batch in waiting:
        yield from batch


def _measure(builder: PromptBuilder, row: Mapping[str, Any], row_id: str) -> tuple[Any, dict[str, list[int | str]]]:
    """Sizes of a row's media, each proven to decode, or what is wrong with them; and the files that the row names with
    their states before."""
    named = {str(key): _state(str(key)) for kind, key in builder.picture_sources(row, row_id) if kind == "path"}
    try:
        return builder.picture_sizes(row, row_id), named
    except DataError as fault:
        return fault, named


def _state(file: str) -> list[int | str]:
    """Of a file that is not there, or an address: its name alone, which is like no state."""
    path = Path(file).expanduser()
    return file_state(path) if path.is_file() else [file]


# ---------------------------------------------------------------- the cache


def _entry(content: str | None, name: str, builder: PromptBuilder, settings: Any) -> Path | None:
    """The file of the cache for rows of this digest and these settings; None where they cannot be told from others."""
    how = builder_digest(builder, settings)
    if content is None or how is None:
        return None
    return cache_dir() / "lengths" / f"{short_hash(content, name, how, _code())}.json"


def builder_digest(builder: PromptBuilder, settings: Any) -> str | None:
    """A hash of all that decides how many tokens a row gets; None for a tokenizer that cannot be hashed."""
    processor = builder.processor
    if not isinstance(processor.tokenizer, PreTrainedTokenizerFast):
        return None
    keys = {key: value for key, value in dataclasses.asdict(settings).items() if key not in ELSEWHERE}
    about = {
        "keys": keys,
        "folder": str(Path.cwd()),  # relative paths of rows start there
        "tokenizer": processor.tokenizer.backend_tokenizer.to_str(),
        "templates": [processor.chat_template, *map(_text, (settings.format_prompt, settings.override_chat_template))],
        "images": processor.image_processor.to_dict(),
        "videos": processor.video_processor.to_dict(),
    }
    return short_hash(json.dumps(about, sort_keys=True, default=str))


def _text(path: str | None) -> str | None:
    return None if path is None else Path(path).expanduser().read_text(encoding="utf-8")


def _code() -> str:
    """A hash of this package's code that reads rows, and the versions of the libraries it calls."""
    whole = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        whole.update(path.read_bytes())
    return f"{whole.hexdigest()} {' '.join(map(_version, LIBRARIES))}"


def _version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return "absent"


def _write(path: Path, scan: Scan) -> None:
    found = dataclasses.asdict(scan) | {"faults": list(scan.faults.items())}
    body = json.dumps(found)
    write_entry(path, f"{short_hash(body)}\n{body}")


def _read(path: Path, rows: int) -> Scan | None:
    """The entry, when it is whole and the files that the rows name are as they were."""
    if not path.is_file():
        return None
    check, _, body = path.read_text(encoding="utf-8", errors="replace").partition("\n")
    if check != short_hash(body):
        return None
    found = json.loads(body)
    if len(found["tokens"]) != rows or any(len(state) == 1 or _state(state[0]) != state for state in found["files"]):
        return None
    by_row = {row: (text, media) for row, (text, media) in found["faults"]}
    return Scan(**found | {"faults": by_row, "cached": True})
