"""One row of a data set becomes one Prompt: messages, chat template text, expanded token ids, resized pictures and
frames, processed pixels.

schemas.py says what a row of whatever shape means, conversation.py makes messages of it.
Everything that the trainer and the rollout server see of a row is made here once, so that both count the same number
of image and video tokens.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jinja2
import jinja2.meta
import torch
from PIL import Image

from grpo_vlm.config import read_template
from grpo_vlm.data.conversation import IMAGE, VIDEO, WORDS, Conversation, Converser
from grpo_vlm.data.entries import inside, source_key
from grpo_vlm.data.media import SizeRule, image_facts
from grpo_vlm.data.pictures import Clip, MediaSettings, Picture, Pictures, metadata
from grpo_vlm.data.schemas import Keys, RawRow, Schema, answer_text, check_text, detect
from grpo_vlm.data.video import ClipShape, clip_shape
from grpo_vlm.errors import ConfigError, DataError

TEXT_CACHE_SIZE = 4096  # rendered and tokenised questions kept per process: generated data sets repeat a few hundred
MediaSize = tuple[int, int] | ClipShape  # of a picture, (width, height); of a video, what is shown of it


@dataclass(frozen=True, eq=False)
class Prompt:
    """A question as the trainer and the rollout engines use it.

    row_id: "FILE:INDEX", follows the sample into metrics, samples and errors.
    messages: chat messages; content is a list of {"type": "text", "text": ...}, {"type": "image"} and {"type":
    "video"} parts in reading order.
    text: the rendered chat template with ONE placeholder token per picture and video (what a server that expands
    itself wants).
    token_ids: the tokenised text with one placeholder per merged patch, and with the time stamps that a model wants
    between frames (what the trainer's forward pass wants).
    images: RGB pictures already at a size that the processor leaves unchanged, in the order of the marks.
    image_keys: a hash of the content of each picture, equal for equal pictures of any row.
    pixels: float32 [patches, patch_dim] of each picture; prompts that were built together share those of equal ones.
    image_grid_thw: int64 [images, 3], patches along time, height and width, None without pictures.
    ground_truth: the answer as text.
    columns: every column of the row but pictures and videos, under the names of the file.
    videos: frames, processed pixels, grid and times of each video, in the order of the marks.
    """

    row_id: str
    messages: list[dict[str, Any]]
    text: str
    token_ids: list[int]
    images: list[Image.Image]
    image_keys: tuple[str, ...]
    pixels: tuple[torch.Tensor, ...]
    image_grid_thw: torch.Tensor | None
    ground_truth: str
    columns: dict[str, Any] = field(default_factory=dict)
    videos: tuple[Clip, ...] = ()

    @property
    def pixel_values(self) -> torch.Tensor | None:
        """All pictures one after the other, as the processor gives them: a copy where there are several."""
        if not self.pixels:
            return None
        return self.pixels[0] if len(self.pixels) == 1 else torch.cat(self.pixels)

    @property
    def video_grid_thw(self) -> torch.Tensor | None:
        """int64 [videos, 3], None without videos."""
        return torch.stack([clip.grid for clip in self.videos]) if self.videos else None


@dataclass(frozen=True)
class _Question:
    """The part of a prompt that depends on the text and the times of frames alone.

    token_ids: one placeholder per picture and per grid step of a video.
    """

    text: str
    token_ids: list[int]


class PromptBuilder:
    """Turns row dicts into Prompts with the settings of the `data` section and a Qwen-VL processor. Can be pickled for
    DataLoader workers.

    schemas: the shape of each file of the set, by its name, as learnt.
    animated: ids of the rows with a moving picture, of which only the first frame is used, as far as they were
    measured.
    Raises ConfigError when the format_prompt or override_chat_template file is absent or not usable.
    """

    def __init__(self, data_config: Any, processor: Any):
        self.processor = processor
        self.keys = Keys.of(data_config)
        self.max_prompt_length = data_config.max_prompt_length
        self.skip_bad_media = data_config.on_bad_media == "skip"
        self.media = MediaSettings.of(processor, data_config)
        self.animated: set[str] = set()
        self.schemas: dict[str, Schema] = {}
        self._system_prompt = data_config.system_prompt
        self._format_text = _read_format_prompt(data_config.format_prompt)
        self._converser = self._make_converser()
        path = self._chat_template_path = data_config.override_chat_template
        self._chat_template = None if path is None else read_template("data.override_chat_template", path)
        self._questions: dict[Hashable, _Question] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_converser": None, "_questions": {}}  # compiled templates cannot be pickled

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._converser = self._make_converser()

    def _make_converser(self) -> Converser:
        template = None if self._format_text is None else _jinja().from_string(self._format_text)
        return Converser(self._system_prompt, template)

    @property
    def size_rule(self) -> SizeRule:
        """Of pictures."""
        return self.media.images

    def learn(self, name: str, columns: Sequence[str], first_rows: Sequence[Mapping[str, Any]]) -> Schema:
        """The shape of rows with these columns, which rows NAME:INDEX are read by from now on; a mixture is learnt
        part by part. Raises DataError when nothing fits."""
        self.schemas[name] = detect(columns, first_rows, self.keys)
        return self.schemas[name]

    def pictures(self) -> Pictures:
        """An empty store for prompts that are built together."""
        return Pictures(self.media)

    def build(self, row: Mapping[str, Any], row_id: str, pictures: Pictures | None = None) -> Prompt:
        """Decodes and processes one row; what `pictures` has is taken from there. Raises DataError naming row,
        column, picture and remedy."""
        pictures = self.pictures() if pictures is None else pictures
        schema, raw, talk = self._read(row, row_id)
        shown = [self._made(schema.image, IMAGE, i, e, pictures.get, row_id) for i, e in enumerate(talk.images)]
        clips = [self._made(schema.video, VIDEO, i, e, pictures.clip, row_id) for i, e in enumerate(talk.videos)]
        question = self._question(talk, [clip.shape for clip in clips], row_id)
        token_ids = self._expand(question.token_ids, shown, clips)
        self._check_length(row_id, len(token_ids), self._media_tokens(shown, clips))
        columns = raw.columns | ({schema.prompt: talk.messages} if schema.conversation else {})
        return Prompt(
            row_id=row_id,
            messages=talk.messages,
            text=question.text,
            token_ids=token_ids,
            images=[picture.image for picture in shown],
            image_keys=tuple(picture.key for picture in shown),
            pixels=tuple(picture.pixels for picture in shown),
            image_grid_thw=torch.stack([picture.grid for picture in shown]) if shown else None,
            ground_truth=answer_text(raw.answer),
            columns=columns,
            videos=tuple(clips),
        )

    def answer(self, row: Mapping[str, Any], row_id: str) -> str:
        """The gold answer as the reward gets it. Raises DataError like build()."""
        return answer_text(self._read(row, row_id)[1].answer)

    def picture_sources(self, row: Mapping[str, Any], row_id: str) -> list[Hashable]:
        """What tells the row's pictures and videos from those of other rows before one is opened, as (kind, key); []
        where a cell is faulty."""
        try:
            _, _, talk = self._read(row, row_id)
        except DataError:  # build() says what is wrong
            return []
        files = [*talk.images, *(file for entry in talk.videos for file in _files(entry))]
        return [source_key(file, self.media.folder) for file in files]

    def picture_sizes(self, row: Mapping[str, Any], row_id: str) -> list[MediaSize]:
        """Of the row's pictures their original (width, height), of its videos the frames that are shown; each proven
        to decode.

        Uses neither tokenizer nor template: safe in threads.
        """
        schema, _, talk = self._read(row, row_id)
        sizes: list[MediaSize] = []
        for index, entry in enumerate(talk.images):
            sizes.append(
                self._made(schema.image, IMAGE, index, entry, lambda e: self._picture_size(e, row_id), row_id)
            )
        for index, entry in enumerate(talk.videos):
            sizes.append(self._made(schema.video, VIDEO, index, entry, self._clip_shape, row_id))
        return sizes

    def prompt_length(self, row: Mapping[str, Any], row_id: str, sizes: Sequence[MediaSize]) -> int:
        """Tokens of the prompt after expansion, from arithmetic alone.

        Checks everything but the media. Raises DataError.
        """
        _, _, talk = self._read(row, row_id)
        clips = [size for size in sizes if isinstance(size, ClipShape)]
        question = self._question(talk, clips, row_id)
        placeholders = len(sizes) - len(clips) + sum(map(self._grid_steps, clips))
        return len(question.token_ids) + self.image_tokens(sizes) - placeholders

    def image_tokens(self, sizes: Sequence[MediaSize]) -> int:
        """Tokens that media of these sizes take in the prompt, time stamps not counted."""
        return sum(
            self._grid_steps(size) * self._frame_tokens(size)
            if isinstance(size, ClipShape)
            else self.size_rule.tokens(*size)
            for size in sizes
        )

    def _grid_steps(self, shape: ClipShape) -> int:
        return len(shape.indices) // self.media.videos.temporal

    def _frame_tokens(self, shape: ClipShape) -> int:
        width, height = shape.size
        return width * height // self.media.videos.factor**2

    def _picture_size(self, entry: Any, row_id: str) -> tuple[int, int]:
        facts = image_facts(entry, self.media.folder, self.media.allow_remote)
        self.size_rule.target(*facts.size)
        if facts.animated:
            self.animated.add(row_id)
        return facts.size

    def _clip_shape(self, entry: Any) -> ClipShape:
        return clip_shape(entry, self.media.videos, self.media.folder, self.media.allow_remote)

    def _made(self, column: str, kind: str, index: int, entry: Any, make: Any, row_id: str) -> Any:
        """make(entry), whose faults get their place."""
        try:
            return make(entry)
        except DataError as error:
            word = WORDS[kind].removesuffix("s")
            raise type(error)(f"{row_id}: column {column!r}, {word} {index}: {error}") from error.__cause__

    def _read(self, row: Mapping[str, Any], row_id: str) -> tuple[Schema, RawRow, Conversation]:
        schema = self.schemas.get(row_id.rpartition(":")[0])
        if schema is None:
            try:
                schema = detect(list(row), [row], self.keys)
            except DataError as error:
                raise DataError(f"{row_id}: {error}") from None
        raw = schema.read(row, row_id)
        return schema, raw, self._converser.converse(raw, schema, row_id)

    def _question(self, talk: Conversation, clips: Sequence[ClipShape], row_id: str) -> _Question:
        key = talk.key, tuple(clips)
        question = self._questions.get(key)
        if question is None:
            question = self._render(talk, clips, row_id)
            if len(self._questions) >= TEXT_CACHE_SIZE:
                self._questions.clear()
            self._questions[key] = question
        return question

    def _render(self, talk: Conversation, clips: Sequence[ClipShape], row_id: str) -> _Question:
        processor, text = self.processor, self._apply_chat_template(talk.messages, row_id)
        for kind, token, wanted in (
            (IMAGE, processor.image_token, len(talk.images)),
            (VIDEO, processor.video_token, len(talk.videos)),
        ):
            found = text.count(token)
            if found != wanted:
                raise DataError(
                    f"{row_id}: the chat template gives {found} {kind} tokens for {wanted} {WORDS[kind]}; the text "
                    f"{talk.shown!r} may hold {token!r} itself (remove it), or the chat template does not write "
                    f"{kind}s"
                )
        check_text(text, f"{row_id}: the prompt")
        first, *others = text.split(processor.video_token)
        stamped = first + "".join(self._steps(clip) + after for clip, after in zip(clips, others, strict=True))
        return _Question(text, processor.tokenizer(stamped, truncation=False)["input_ids"])

    def _steps(self, shape: ClipShape) -> str:
        """What the processor writes for a video with one placeholder for each grid step."""
        side = self.processor.video_processor.merge_size
        made = {
            "video_grid_thw": torch.tensor([[self._grid_steps(shape), side, side]]),
            "video_metadata": [metadata(shape)],
        }
        return self.processor.replace_video_token(made, 0)

    def _apply_chat_template(self, messages: list[dict[str, Any]], row_id: str) -> str:
        path = self._chat_template_path
        try:
            return self.processor.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, chat_template=self._chat_template
            )
        except jinja2.TemplateSyntaxError as error:
            if path is None:  # the model's own template
                raise
            place = f"{path}, line {error.lineno}"
            raise ConfigError(f"data.override_chat_template: {place}: {error.message}; fix it") from None
        except (jinja2.TemplateError, TypeError) as error:  # what it refuses itself, or a name that is not there
            whose = "the model's chat template" if path is None else f"data.override_chat_template ({path})"
            reason = " ".join(str(error).split())
            raise DataError(f"{row_id}: {whose} cannot write this row: {reason}; fix one of the two") from error

    def _expand(self, token_ids: list[int], shown: Sequence[Picture], clips: Sequence[Clip]) -> list[int]:
        """One placeholder per merged patch in the place of each picture and each grid step."""
        pictures = iter([_merged(picture.grid, self.size_rule.merge_size) for picture in shown])
        merge = self.processor.video_processor.merge_size
        steps = iter([_merged(clip.grid, merge) // int(clip.grid[0]) for clip in clips for _ in range(clip.grid[0])])
        counts = {self.processor.image_token_id: pictures, self.processor.video_token_id: steps}
        return [t for token in token_ids for t in ([token] * next(counts[token]) if token in counts else [token])]

    def _media_tokens(self, shown: Sequence[Picture], clips: Sequence[Clip]) -> int:
        return sum(_merged(item.grid, self.size_rule.merge_size) for item in (*shown, *clips))

    def _check_length(self, row_id: str, tokens: int, media_tokens: int) -> None:
        if tokens > self.max_prompt_length:
            raise DataError(overlong_message(row_id, tokens, media_tokens, self.max_prompt_length))


def _merged(grid: torch.Tensor, merge_size: int) -> int:
    return int(grid.prod()) // merge_size**2


def _files(entry: Any) -> list[Any]:
    """The files of one video: itself, or its frames."""
    source = inside(entry) if isinstance(entry, Mapping) else entry
    return list(source) if isinstance(source, (list, tuple)) else [source]


def overlong_message(row_id: str, tokens: int, image_tokens: int, limit: int) -> str:
    """Why a prompt is refused, with the numbers and the ways out."""
    return (
        f"{row_id}: the prompt has {tokens} tokens ({image_tokens} of them for media), data.max_prompt_length is "
        f"{limit}; raise it to {tokens}, lower data.max_pixels (for videos also data.video_max_frames), or set "
        "data.filter_overlong_prompts=true"
    )


def _jinja() -> jinja2.Environment:
    return jinja2.Environment(undefined=jinja2.StrictUndefined)


def _read_format_prompt(path: str | None) -> str | None:
    """The template's source, checked to use `content` and nothing else that the rows do not give."""
    if path is None:
        return None
    source = read_template("data.format_prompt", path)
    try:
        _jinja().from_string(source)  # compiled, since parsing alone accepts unknown filters
        variables = jinja2.meta.find_undeclared_variables(_jinja().parse(source))
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"data.format_prompt: {path}, line {error.lineno}: {error.message}; fix it") from None
    if variables != {"content"}:
        raise ConfigError(
            f"data.format_prompt: {path} uses {sorted(variables) or 'no variable'}; it must use `content`, the "
            "question, and nothing else"
        )
    return source.strip()
