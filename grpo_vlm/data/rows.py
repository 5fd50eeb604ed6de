"""One row of a data set becomes one Prompt: messages, chat template text, expanded token ids, resized pictures,
processed pixels.

Rows have EasyR1's shape: a text column with `<image>` marks, a column with a list of pictures, an answer column; every
other column is carried along.
Everything that the trainer and the rollout server see of a row is made here once, so that both count the same number
of image tokens.
"""

import json
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jinja2
import jinja2.meta
import torch
from PIL import Image

from grpo_vlm.config import read_template
from grpo_vlm.data.media import SizeRule, image_entries, image_size, source_key
from grpo_vlm.data.pictures import Picture, Pictures
from grpo_vlm.errors import ConfigError, DataError

IMAGE_MARK = "<image>"
TEXT_CACHE_SIZE = 4096  # rendered and tokenised questions kept per process: generated data sets repeat a few hundred


@dataclass(frozen=True, eq=False)
class Prompt:
    """A question as the trainer and the rollout engines use it.

    row_id: "FILE:INDEX", follows the sample into metrics, samples and errors.
    messages: chat messages; content is a list of {"type": "text", "text": ...} and {"type": "image"} parts in reading
    order.
    text: the rendered chat template with ONE image placeholder token per picture (what a server that expands itself
    wants).
    token_ids: the tokenised text with one placeholder per merged patch (what the trainer's forward pass wants).
    images: RGB pictures already at a size that the processor leaves unchanged, in the order of the marks.
    image_keys: a hash of the content of each picture, equal for equal pictures of any row.
    pixels: float32 [patches, patch_dim] of each picture; prompts that were built together share those of equal ones.
    image_grid_thw: int64 [images, 3], patches along time, height and width, None without pictures.
    ground_truth: the answer column as text.
    columns: every column of the row but pictures and videos, under the names of the file.
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

    @property
    def pixel_values(self) -> torch.Tensor | None:
        """All pictures one after the other, as the processor gives them: a copy where there are several."""
        if not self.pixels:
            return None
        return self.pixels[0] if len(self.pixels) == 1 else torch.cat(self.pixels)


@dataclass(frozen=True)
class _Question:
    """The part of a prompt that depends on the text alone."""

    messages: list[dict[str, Any]]
    text: str
    token_ids: list[int]  # one placeholder per picture


class PromptBuilder:
    """Turns row dicts into Prompts with the settings of the `data` section and a Qwen-VL processor. Can be pickled for
    DataLoader workers.

    Raises ConfigError when the format_prompt or override_chat_template file is absent or not usable.
    """

    def __init__(self, data_config: Any, processor: Any):
        self.processor = processor
        self.prompt_key = data_config.prompt_key
        self.answer_key = data_config.answer_key
        self.image_key = data_config.image_key
        self.video_key = data_config.video_key
        self.image_dir = data_config.image_dir
        self.system_prompt = data_config.system_prompt
        self.max_prompt_length = data_config.max_prompt_length
        self.size_rule = SizeRule.of(processor.image_processor, data_config.min_pixels, data_config.max_pixels)
        self._format_text = _read_format_prompt(data_config.format_prompt)
        self._format = None if self._format_text is None else _jinja().from_string(self._format_text)
        path = self._chat_template_path = data_config.override_chat_template
        self._chat_template = None if path is None else read_template("data.override_chat_template", path)
        self._questions: dict[str, _Question] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_format": None, "_questions": {}}  # compiled templates cannot be pickled

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._format = None if self._format_text is None else _jinja().from_string(self._format_text)

    def pictures(self) -> Pictures:
        """An empty store for prompts that are built together."""
        return Pictures(self.processor.image_processor, self.size_rule, self.image_dir)

    def build(self, row: Mapping[str, Any], row_id: str, pictures: Pictures | None = None) -> Prompt:
        """Decodes and processes one row; what `pictures` has is taken from there. Raises DataError naming row,
        column, picture and remedy."""
        question = self._question(row, row_id)
        shown = self._shown(row, row_id, self.pictures() if pictures is None else pictures)
        counts = [self.size_rule.final_tokens(*picture.image.size) for picture in shown]
        token_ids = self._expand(question.token_ids, counts)
        self._check_length(row_id, len(token_ids), sum(counts))
        grids = torch.stack([picture.grid for picture in shown]) if shown else None
        if shown:
            merged = grids.prod(-1) // self.size_rule.merge_size**2
            assert merged.tolist() == counts, f"{row_id}: image tokens {counts}, the processor made {merged.tolist()}"
        return Prompt(
            row_id=row_id,
            messages=question.messages,
            text=question.text,
            token_ids=token_ids,
            images=[picture.image for picture in shown],
            image_keys=tuple(picture.key for picture in shown),
            pixels=tuple(picture.pixels for picture in shown),
            image_grid_thw=grids,
            ground_truth=self._ground_truth(row, row_id),
            columns={key: value for key, value in row.items() if key not in (self.image_key, self.video_key)},
        )

    def picture_sources(self, row: Mapping[str, Any]) -> list[Hashable]:
        """What tells the row's pictures from those of other rows before one is opened; [] where a cell is faulty."""
        try:
            return [source_key(entry, self.image_dir) for entry in image_entries(row.get(self.image_key))]
        except DataError:  # build() says what is wrong
            return []

    def picture_sizes(self, row: Mapping[str, Any], row_id: str) -> list[tuple[int, int]]:
        """Original (width, height) of the row's pictures, each proven to decode.

        Uses neither tokenizer nor template: safe in threads.
        """
        sizes = []
        for index, entry in enumerate(self._entries(row, row_id)):
            try:
                sizes.append(image_size(entry, self.image_dir))
                self.size_rule.target(*sizes[-1])
            except DataError as error:
                raise self._picture_error(row_id, index, error) from error.__cause__
        return sizes

    def prompt_length(self, row: Mapping[str, Any], row_id: str, sizes: list[tuple[int, int]]) -> int:
        """Tokens of the prompt after image expansion, from arithmetic alone.

        Checks everything but the pictures. Raises DataError.
        """
        self._ground_truth(row, row_id)
        return len(self._question(row, row_id).token_ids) + self.image_tokens(sizes) - len(sizes)

    def image_tokens(self, sizes: list[tuple[int, int]]) -> int:
        """Tokens that pictures of these original sizes take in the prompt."""
        return sum(self.size_rule.tokens(*size) for size in sizes)

    def _question(self, row: Mapping[str, Any], row_id: str) -> _Question:
        problem = self._cell(row, row_id, self.prompt_key)
        if not isinstance(problem, str) or not problem.strip():
            raise DataError(
                f"{row_id}: column {self.prompt_key!r} must hold the question as text, found "
                f"{type(problem).__name__} {str(problem)[:60]!r}; fix the row or set data.prompt_key"
            )
        if _filled(row.get(self.video_key)):
            raise DataError(
                f"{row_id}: column {self.video_key!r} is filled, but videos are not supported yet; remove the column "
                "or set data.video_key to a name that the rows do not have"
            )
        marks, found = problem.count(IMAGE_MARK), len(self._entries(row, row_id))
        if marks != found:
            absent = "" if self.image_key in row else f" (there is no such column; present: {', '.join(row)})"
            raise DataError(
                f"{row_id}: {marks} {IMAGE_MARK} marks in column {self.prompt_key!r} but {found} pictures in column "
                f"{self.image_key!r}{absent}; text starts {problem[:60]!r}; make them equal or set data.image_key"
            )
        question = self._questions.get(problem)
        if question is None:
            question = self._render(problem, marks, row_id)
            if len(self._questions) >= TEXT_CACHE_SIZE:
                self._questions.clear()
            self._questions[problem] = question
        return question

    def _render(self, problem: str, marks: int, row_id: str) -> _Question:
        written = problem if self._format is None else self._format.render(content=problem)
        if written.count(IMAGE_MARK) != marks:
            raise DataError(
                f"{row_id}: data.format_prompt turns {marks} {IMAGE_MARK} marks into {written.count(IMAGE_MARK)}; "
                "the template must write `content` exactly once and no mark of its own"
            )
        content: list[dict[str, Any]] = []
        for index, part in enumerate(written.split(IMAGE_MARK)):
            if index:
                content.append({"type": "image"})
            if part:
                content.append({"type": "text", "text": part})
        messages = [{"role": "user", "content": content}]
        if self.system_prompt:
            messages.insert(0, {"role": "system", "content": [{"type": "text", "text": self.system_prompt}]})
        text = self._apply_chat_template(messages)
        token_ids = self.processor.tokenizer(text, truncation=False)["input_ids"]
        placeholders = token_ids.count(self.processor.image_token_id)
        if placeholders != marks or self.processor.video_token_id in token_ids:
            raise DataError(
                f"{row_id}: the chat template gives {placeholders} image tokens for {marks} pictures; the text "
                f"{problem[:60]!r} may hold {self.processor.image_token!r} or {self.processor.video_token!r} itself "
                "(remove it), or the chat template does not write images"
            )
        return _Question(messages, text, token_ids)

    def _apply_chat_template(self, messages: list[dict[str, Any]]) -> str:
        try:
            return self.processor.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, chat_template=self._chat_template
            )
        except jinja2.TemplateSyntaxError as error:
            if self._chat_template is None:  # the model's own template
                raise
            place = f"{self._chat_template_path}, line {error.lineno}"
            raise ConfigError(f"data.override_chat_template: {place}: {error.message}; fix it") from None

    def _expand(self, token_ids: list[int], counts: list[int]) -> list[int]:
        counts_left = iter(counts)
        image_token = self.processor.image_token_id
        return [t for token in token_ids for t in ([token] * next(counts_left) if token == image_token else [token])]

    def _check_length(self, row_id: str, tokens: int, image_tokens: int) -> None:
        if tokens > self.max_prompt_length:
            raise DataError(overlong_message(row_id, tokens, image_tokens, self.max_prompt_length))

    def _shown(self, row: Mapping[str, Any], row_id: str, pictures: Pictures) -> list[Picture]:
        shown = []
        for index, entry in enumerate(self._entries(row, row_id)):
            try:
                shown.append(pictures.get(entry))
            except DataError as error:
                raise self._picture_error(row_id, index, error) from error.__cause__
        return shown

    def _entries(self, row: Mapping[str, Any], row_id: str) -> list[Any]:
        try:
            return image_entries(row.get(self.image_key))
        except DataError as error:
            raise DataError(f"{row_id}: column {self.image_key!r}: {error}") from None

    def _picture_error(self, row_id: str, index: int, error: DataError) -> DataError:
        return DataError(f"{row_id}: column {self.image_key!r}, picture {index}: {error}")

    def _ground_truth(self, row: Mapping[str, Any], row_id: str) -> str:
        answer = self._cell(row, row_id, self.answer_key)
        if answer is None:
            raise DataError(f"{row_id}: column {self.answer_key!r} is empty; fill the answer or remove the row")
        return answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False, default=str)

    def _cell(self, row: Mapping[str, Any], row_id: str, key: str) -> Any:
        if key not in row:
            raise DataError(
                f"{row_id}: no column {key!r}; present: {', '.join(row)}; rename it or set the data.*_key options"
            )
        return row[key]


def overlong_message(row_id: str, tokens: int, image_tokens: int, limit: int) -> str:
    """Why a prompt is refused, with the numbers and the ways out."""
    return (
        f"{row_id}: the prompt has {tokens} tokens ({image_tokens} of them for pictures), data.max_prompt_length is "
        f"{limit}; raise it to {tokens}, lower data.max_pixels, or set data.filter_overlong_prompts=true"
    )


def _filled(cell: Any) -> bool:
    return cell is not None and (not isinstance(cell, (str, list, tuple)) or len(cell) > 0)


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
