"""`grpo-vlm reward FILE:FUNCTION --data FILE`: what a reward function makes of answers, and how long it takes.

With --completions these are answers that someone gave, for example samples.jsonl of a run folder. Without, they are
the rows' own gold answers as a model might write them, and an empty one.
"""

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from grpo_vlm.config import Config, load_config
from grpo_vlm.data.conversation import Converser
from grpo_vlm.data.schemas import Keys, answer_text, detect
from grpo_vlm.data.sources import RowSource, open_source
from grpo_vlm.errors import ConfigError, DataError
from grpo_vlm.rewards.forms import RewardSample
from grpo_vlm.rewards.pool import Fault, Limits, RewardPool
from grpo_vlm.rewards.results import Scores

FIRST_ROWS = 8
TIMED_CALLS = 200
SHOWN_ROWS = 20
RESPONSE_NAMES = ("response", "completion", "text")
NO_TOKENS = "response_length counts words and token_ids is empty: there is no tokenizer here"
WRAPPINGS = {  # how a model might write the right answer
    "as it is": "{}",
    "boxed": "The two angles add up, so it is \\boxed{{{}}}.",
    "thought, boxed": "<think>The two angles add up.</think>\n\\boxed{{{}}}",
    "thought, <answer>": "<think>The two angles add up.</think>\n<answer>{}</answer>",
    "in a sentence": "The answer is {}.",
    "empty": "",
}


@dataclass(frozen=True)
class Try:
    """Answers of one kind with what became of them. timed: the first TIMED_CALLS that got a score, each with the
    seconds of a call for it alone."""

    kind: str
    samples: list[RewardSample]
    scores: list[Scores | None]
    call_s: float
    timed: list[tuple[RewardSample, float]]


def main(arguments: Sequence[str]) -> None:
    """Prints the tables. Raises RewardError when the function is broken, DataError and ConfigError for the rest."""
    options = _parser().parse_intermixed_args(arguments)
    config = load_config(options.config, options.overrides)
    source = open_source(options.data or config.data.train_files)
    if options.completions is None:
        rows = _samples(source, range(min(options.rows or FIRST_ROWS, len(source))), config)
        answers = {
            kind: [_answered(row, text.format(row.ground_truth)) for row in rows] for kind, text in WRAPPINGS.items()
        }
    else:
        answers = {Path(options.completions).name: _given(source, Path(options.completions), options.rows, config)}
    console, faults = Console(highlight=False), []
    reward = config.worker.reward
    limits = Limits(reward.num_workers, reward.timeout_s, reward.memory_limit_gb, reward.max_concurrency)
    pool = RewardPool(
        options.function,
        dict(reward.reward_function_kwargs),
        weights=options.weights,
        limits=limits,
        on_fault=faults.append,
    )
    try:
        pool.load()
        _print(console, [_try(pool, kind, samples) for kind, samples in answers.items()], faults)
        if pool.uses_grader:
            _print_golds(console, pool, next(iter(answers.values())))
    finally:
        pool.close()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="grpo-vlm reward", description=__doc__.split("\n\n")[0], allow_abbrev=False)
    parser.add_argument("function", nargs="+", help="FILE.py:FUNCTION or package.module:FUNCTION; several are summed")
    parser.add_argument("--data", metavar="FILE", default="", help="PATH[@split]; by default data.train_files")
    parser.add_argument("--completions", metavar="FILE", help="answers: JSON lines with row_id and response, or texts")
    parser.add_argument("--rows", type=int, metavar="N", help=f"how many (default {FIRST_ROWS}, or all completions)")
    parser.add_argument("--weights", type=float, nargs="+", default=[], metavar="W", help="one for each function")
    parser.add_argument("--config", metavar="FILE", help="configuration whose `data` and `worker.reward` keys count")
    parser.add_argument(
        "--set", dest="overrides", nargs="+", default=[], metavar="key=value", help="keys on top of it"
    )
    return parser


def _samples(source: RowSource, numbers: Sequence[int], config: Config) -> list[RewardSample]:
    """The rows with an empty answer each. Pictures are not opened, and nothing is tokenised."""
    samples = []
    for number in numbers:
        (row,) = source.rows(number, number + 1)
        schema = detect(list(row), [row], Keys.of(config.data))
        raw = schema.read(row, source.row_id(number))
        messages = Converser(config.data.system_prompt, None).converse(raw, schema, source.row_id(number)).messages
        text = "\n".join(str(message["content"]) for message in messages)
        gold = answer_text(raw.answer)
        samples.append(RewardSample(source.row_id(number), "", 0, (), gold, messages, text, raw.columns))
    return samples


def _answered(sample: RewardSample, response: str, length: int | None = None) -> RewardSample:
    return replace(sample, response=response, response_length=len(response.split()) if length is None else length)


def _given(source: RowSource, path: Path, count: int | None, config: Config) -> list[RewardSample]:
    """The completions of a file, each with its row: by row_id, else in the order of the rows."""
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except OSError as error:
        raise ConfigError(f"--completions: {path} cannot be read: {error.strerror}") from None
    numbers = {source.row_id(number): number for number in range(len(source))}
    found, known = [], {}
    for order, line in enumerate(islice(lines, count)):
        item = _item(line, f"{path}, line {order + 1}")
        row_id = item.get("row_id", source.row_id(order) if order < len(source) else None)
        if row_id not in numbers:
            raise DataError(
                f"{path}, line {order + 1}: the data has no row {row_id!r} ({len(source)} rows, the first is "
                f"{source.row_id(0)!r}); name the file with --data from which the answers are"
            )
        if row_id not in known:
            (known[row_id],) = _samples(source, [numbers[row_id]], config)
        response = next((item[name] for name in RESPONSE_NAMES if name in item), None)
        if not isinstance(response, str):
            raise DataError(
                f"{path}, line {order + 1}: no text under {' or '.join(RESPONSE_NAMES)}; keys {list(item)}"
            )
        found.append(_answered(known[row_id], response, item.get("response_length")))
    if not found:
        raise DataError(f"{path}: there are no completions in it")
    return found


def _item(line: str, where: str) -> Mapping[str, Any]:
    """One line: a JSON object, a JSON text, or plain text."""
    if line[0] not in '{"':
        return {"response": line}
    try:
        item = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not valid JSON: {error.msg}; fix this line") from None
    return {"response": item} if isinstance(item, str) else item


def _try(pool: RewardPool, kind: str, samples: list[RewardSample]) -> Try:
    began = time.perf_counter()
    scores = pool(samples)
    call_s = time.perf_counter() - began
    timed = []
    for sample, score in islice(zip(samples, scores, strict=True), TIMED_CALLS):
        if score is not None:  # those that hang have been waited for once
            began = time.perf_counter()
            pool([sample])
            timed.append((sample, time.perf_counter() - began))
    return Try(kind, samples, scores, call_s, timed)


def _print(console: Console, tries: Sequence[Try], faults: Sequence[Fault]) -> None:
    keys = list(dict.fromkeys(key for one in tries for score in one.scores if score for key in score))
    table = Table(title="mean scores", title_justify="left")
    for name in ("answers", "samples", *keys, "not scored", "ms for all", "ms for one"):
        table.add_column(name, justify="left" if name == "answers" else "right")
    for one in tries:
        means = [_mean([score[key] for score in one.scores if score and key in score]) for key in keys]
        unscored = sum(score is None for score in one.scores)
        alone = _mean([1000 * seconds for _, seconds in one.timed])
        table.add_row(one.kind, str(len(one.samples)), *means, str(unscored), f"{1000 * one.call_s:.1f}", alone)
    console.print(table)
    console.print(_sample_table(tries, keys))
    console.print(Text(_slowest(tries, faults)))
    for fault in {fault.row_id + fault.response: fault for fault in faults}.values():
        console.print(Text.assemble(("warning: ", "yellow"), fault.text))
    console.print(Text(NO_TOKENS, style="dim"))


def _slowest(tries: Sequence[Try], faults: Sequence[Fault]) -> str:
    """The row that took longest, with those that were stopped or raised."""
    times = [
        (seconds, sample.row_id, f" ({one.kind})", sample.response) for one in tries for sample, seconds in one.timed
    ]
    times += [(fault.seconds, fault.row_id, f" ({fault.cause})", fault.response) for fault in faults]
    if not times:
        return "slowest: no row was called alone"
    seconds, row_id, what, response = max(times)
    return f"slowest: {row_id}{what}, {1000 * seconds:.1f} ms: {_end(response)}"


def _sample_table(tries: Sequence[Try], keys: Sequence[str]) -> Table:
    """The first samples: of each kind as many, so that every way to write an answer is seen."""
    table = Table(title="samples", title_justify="left")
    for name in ("row", "gold", "answer ends", *keys):
        table.add_column(name, justify="right" if name in keys else "left")
    each = max(1, SHOWN_ROWS // len(tries))
    for one in tries:
        for sample, score in islice(zip(one.samples, one.scores, strict=True), each):
            values = ["-" if score is None or key not in score else f"{score[key]:.3f}" for key in keys]
            table.add_row(sample.row_id, Text(_end(sample.ground_truth)), Text(_end(sample.response)), *values)
    return table


def _print_golds(console: Console, pool: RewardPool, samples: Sequence[RewardSample]) -> None:
    golds = {sample.ground_truth: sample.row_id for sample in samples}
    verdicts = pool.grade_golds(list(golds), pool.limits.timeout_s)
    bad = [row_id for row_id, right in zip(golds.values(), verdicts, strict=True) if right is False]
    if bad:
        text = f"{len(bad)} of {len(golds)} golds cannot be graded, not even against themselves: {', '.join(bad)}"
        console.print(Text.assemble(("warning: ", "yellow"), text))


def _end(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 40 else f"...{line[-37:]}"


def _mean(values: Sequence[float]) -> str:
    return f"{sum(values) / len(values):.3f}" if values else "-"
