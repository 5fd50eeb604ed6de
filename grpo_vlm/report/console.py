"""What a run prints: its summary, one line per step, and the scores and samples at the end.

On a terminal a live line also shows the phase within the step, and a step's line has the reward's trend and a bar of
its phases. Where the output is a file or a pipe the lines come plain, without a single escape sequence.
"""

import re
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from rich import box
from rich.console import Console as RichConsole
from rich.live import Live
from rich.table import Table
from rich.text import Text

from grpo_vlm.report.files import REPORT_NAME
from grpo_vlm.report.record import Sample, StepRecord

SHORT_PHASES = {"update_actor": "update", "validation": "val", "save_checkpoint": "save"}
PHASE_COLORS = {
    "gen": "blue",
    "reward": "magenta",
    "old": "yellow",
    "ref": "cyan",
    "update": "green",
    "sync": "red",
    "val": "bright_blue",
    "save": "bright_magenta",
}
OTHER_COLOR = "bright_black"
BAR_CELLS = 24
TREND = "▁▂▃▄▅▆▇█"
TREND_STEPS = 12
SPEEDS = (  # metric, how it is said
    ("perf/throughput", "{:,.0f} tokens/s/GPU"),
    ("perf/rollouts_per_s_per_gpu", "{:.3g} rollouts/s/GPU"),
    ("perf/mfu_actor", "MFU {:.0%}"),
)
PLAIN_WIDTH = 119
WINDOW_STEPS = 10
MAX_SAMPLES = 5
SPECIAL_TOKEN = re.compile(r"<\|[^|>]*\|>")


class Console:
    """Prints to `file`, by default standard output; with enabled=False (all processes but the main one) nothing."""

    def __init__(self, file: TextIO | None = None, *, enabled: bool = True) -> None:
        self.is_terminal = (file or sys.stdout).isatty()
        self._rich = RichConsole(
            file=file,
            force_terminal=self.is_terminal,
            # FORCE_COLOR and notebooks must not bring escape sequences into a file
            color_system="auto" if self.is_terminal else None,
            force_jupyter=False,
            width=None if self.is_terminal else PLAIN_WIDTH,
            highlight=False,
            markup=False,
            emoji=False,
            quiet=not enabled,
        )
        self._enabled = enabled
        self._live: Live | None = None
        self._step_seconds: deque[float] = deque(maxlen=WINDOW_STEPS)
        self._rewards: deque[float] = deque(maxlen=TREND_STEPS)

    def start(self, summary: Mapping[str, object], title: str = "grpo_vlm") -> None:
        """Prints what will run: one aligned line per entry of `summary`."""
        self._print(Text(title, style="bold"))
        width = max((len(key) for key in summary), default=0)
        for key, value in summary.items():
            self._print(Text.assemble("  ", (key.ljust(width), "cyan"), "  ", self._clean(str(value))))

    def note(self, text: str) -> None:
        """Prints one line that the user should know."""
        self._print(Text(self._clean(text)))

    def warn(self, text: str) -> None:
        """Prints one line that the user should act on."""
        self._print(Text.assemble(("warning: ", "yellow"), self._clean(text)))

    def progress(self, text: str) -> None:
        """Changes the live line of the phase in progress; without a terminal it shows nothing."""
        if self._live is not None:
            self._live.update(Text(f"{self._clean(text)} ...", style="dim"), refresh=True)

    @contextmanager
    def phase(self, name: str) -> Iterator[Callable[[int, int], None]]:
        """Shows `name` on the live line while the block runs; yields a function that takes (done, total).

        Without a terminal it shows nothing. No thread refreshes the line: it changes when something is reported.
        """

        def show(done: int | None = None, total: int | None = None) -> None:
            if self._live is not None:
                self._live.update(self._live_text(name, done, total), refresh=True)

        around = None if self._live is None else self._live.renderable
        outermost = around is None
        if outermost and self.is_terminal and self._enabled:
            self._live = Live(console=self._rich, auto_refresh=False, transient=True)
            self._live.start()
        show()
        try:
            yield show
        finally:
            if outermost:
                self.close()
            elif self._live is not None:
                self._live.update(around, refresh=True)

    def step(self, record: StepRecord, total_steps: int) -> None:
        """Prints the line of one step.

        The reward's change is against the step before; the time left comes from the mean of the last ten steps. On a
        CPU "GPU" means a training process.
        """
        width = len(str(total_steps))
        parts = [Text(f"step {record.step:>{width}}/{total_steps}", style="bold")]
        reward = record.metrics.get("reward/overall")
        if reward is not None:
            change = f" ({reward - self._rewards[-1]:+.3f})" if self._rewards else ""
            self._rewards.append(reward)
            trend = f" {draw_trend(self._rewards)}" if self._draws and len(self._rewards) > 1 else ""
            parts.append(Text.assemble(f"reward {reward:.3f}{change}", (trend, "green")))
        if "val/reward_score" in record.metrics:
            parts.append(Text(f"val {record.metrics['val/reward_score']:.3f}", style="green"))
        phases = [(SHORT_PHASES.get(name, name), value) for name, value in record.seconds.items() if name != "step"]
        if phases:
            parts.append(self._phase_text(phases))
        speeds = [text.format(record.metrics[name]) for name, text in SPEEDS if record.metrics.get(name) is not None]
        if speeds:
            parts.append(Text(" ".join(speeds), style="dim"))
        if record.step > 0:
            self._step_seconds.append(record.seconds.get("step", sum(value for _, value in phases)))
            left_s = (total_steps - record.step) * sum(self._step_seconds) / len(self._step_seconds)
            parts.append(Text(f"left {format_seconds(left_s)}"))
        self._print(Text("  ").join(parts))

    def finish(
        self,
        before: Mapping[str, float],
        after: Mapping[str, float],
        samples: Sequence[Sample],
        path: str | Path,
    ) -> None:
        """Prints the held-out scores before and after training, five sample answers and where the report and
        the run's files are.

        Scores that were not measured on one side are shown as "-".
        """
        names = [*before, *(name for name in after if name not in before)]
        if names:
            self._print(self._score_table(names, before, after))
        if samples:
            self._print(self._sample_table(samples[:MAX_SAMPLES]))
        self._print(Text.assemble("report: ", (str(Path(path, REPORT_NAME)), "bold")))
        self._print(Text.assemble("run folder: ", (str(path), "bold")))

    def close(self) -> None:
        """Takes the live line away. Idempotent."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    @property
    def _draws(self) -> bool:
        """Whether trend and bars can be shown."""
        return self.is_terminal and self._rich.encoding.startswith("utf")

    def _live_text(self, name: str, done: int | None, total: int | None) -> Text:
        """The phase in progress, and how far it is where that is known."""
        if done is None or not total:
            return Text(f"{name} ...", style="dim")
        text = Text(f"{name}  {done}/{total} ...", style="dim")
        if self._draws:
            cells = BAR_CELLS * min(done, total) // total
            text.append(f" {'━' * cells}", style=PHASE_COLORS.get(name, "blue")).append("─" * (BAR_CELLS - cells))
        return text

    def _phase_text(self, phases: Sequence[tuple[str, float]]) -> Text:
        """Each phase with its seconds; on a terminal a bar in front, in which each has its color and its share."""
        if not self._draws:
            return Text(" ".join(f"{name} {value:.1f}s" for name, value in phases), style="dim")
        text, total, done = Text(), sum(value for _, value in phases) or 1.0, 0.0
        for name, value in phases:
            cells = round(BAR_CELLS * (done + value) / total) - round(BAR_CELLS * done / total)
            text.append("━" * cells, style=PHASE_COLORS.get(name, OTHER_COLOR))
            done += value
        for name, value in phases:
            text.append(f" {name}", style=PHASE_COLORS.get(name, OTHER_COLOR)).append(f" {value:.1f}s", style="dim")
        return text

    def _print(self, content: Text | Table) -> None:
        # a line is never wrapped: a step stays one line in a log
        self._rich.print(content, soft_wrap=isinstance(content, Text))

    def _score_table(self, names: list[str], before: Mapping[str, float], after: Mapping[str, float]) -> Table:
        table = Table(title="held-out scores", box=box.SIMPLE_HEAD, title_justify="left")
        table.add_column("score")
        for column in ("before", "after", "change"):
            table.add_column(column, justify="right")
        for name in names:
            old, new = before.get(name), after.get(name)
            change = "-" if old is None or new is None else f"{new - old:+.3f}"
            table.add_row(self._clean(name), _format_score(old), _format_score(new), change)
        return table

    def _sample_table(self, samples: Sequence[Sample]) -> Table:
        table = Table(title="sample answers", box=box.SIMPLE_HEAD, title_justify="left")
        table.add_column("prompt ends", ratio=3)
        table.add_column("answer", ratio=3)
        table.add_column("gold", ratio=1)
        table.add_column("score", justify="right", no_wrap=True)
        for sample in samples:
            # the end of an answer is where its result stands
            prompt, response, gold = (
                _keep_end(self._clean(text), length)
                for text, length in (
                    (SPECIAL_TOKEN.sub(" ", sample.prompt), 90),
                    (sample.response, 160),
                    (sample.ground_truth, 60),
                )
            )
            table.add_row(prompt, response, gold, _format_score(sample.scores.get("overall")))
        return table

    def _clean(self, text: str) -> str:
        """One line of printable characters that the output's encoding has: a model may write anything."""
        line = " ".join(text.split())
        printable = "".join(char if char.isprintable() else "?" for char in line)
        encoding = self._rich.encoding
        return printable.encode(encoding, errors="replace").decode(encoding)


def draw_trend(values: Sequence[float]) -> str:
    """One block for each value, as high as it is between the lowest and the highest of them."""
    low, high = min(values), max(values)
    if high == low:
        return TREND[len(TREND) // 2] * len(values)
    return "".join(TREND[round((value - low) / (high - low) * (len(TREND) - 1))] for value in values)


def format_seconds(seconds: float) -> str:
    """1h02m, 3m10s or 12s."""
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    if whole >= 60:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole}s"


def _format_score(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _keep_end(text: str, length: int) -> str:
    return text if len(text) <= length else "..." + text[-(length - 3) :]
