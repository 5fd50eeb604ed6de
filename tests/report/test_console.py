"""What the console prints: the same plain lines in a file or a pipe, a live line only on a terminal."""

import io
import re

from grpo_vlm.report import Sample, StepRecord
from grpo_vlm.report.console import Console, draw_trend, format_seconds


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def make_record(step: int, reward: float, step_seconds: float, **metrics: float) -> StepRecord:
    seconds = {"gen": 2.1, "reward": 0.04, "update_actor": 3.0, "sync": 0.1, "step": step_seconds}
    return StepRecord(step, {"reward/overall": reward, **metrics}, [], seconds)


def test_one_line_per_step():
    stream = io.StringIO()
    console = Console(stream)
    console.step(StepRecord(0, {"val/reward_score": 0.25}, [], {"validation": 9.0}), 50)
    console.step(make_record(11, 0.391, 4.0), 50)
    console.step(make_record(12, 0.412, 6.0, **{"val/reward_score": 0.3}), 50)
    assert stream.getvalue().splitlines() == [
        "step  0/50  val 0.250  val 9.0s",
        "step 11/50  reward 0.391  gen 2.1s reward 0.0s update 3.0s sync 0.1s  left 2m36s",
        # 38 steps of (4 + 6) / 2 seconds
        "step 12/50  reward 0.412 (+0.021)  val 0.300  gen 2.1s reward 0.0s update 3.0s sync 0.1s  left 3m10s",
    ]


def test_a_step_tells_its_speed_and_on_a_terminal_shows_trend_and_phases():
    speed = {"perf/throughput": 5216.4, "perf/rollouts_per_s_per_gpu": 12.34, "perf/mfu_actor": 0.343}
    for stream in (io.StringIO(), Terminal()):
        console = Console(stream)
        for step, reward in enumerate((0.1, 0.5, 0.4), 1):
            console.step(make_record(step, reward, 5.3, **speed), 3)
        last = re.sub(r"\x1b\[[\d;]*m", "", stream.getvalue().splitlines()[-1])
        phases = "gen 2.1s reward 0.0s update 3.0s sync 0.1s"
        drawn = ("", "") if not stream.isatty() else (" ▁█▆", "━" * 24 + " ")
        assert last == (
            f"step 3/3  reward 0.400 (-0.100){drawn[0]}  {drawn[1]}{phases}"
            "  5,216 tokens/s/GPU 12.3 rollouts/s/GPU MFU 34%  left 0s"
        )
    assert "\x1b[34m" + "━" * 10 in stream.getvalue()  # generation: 2.1 of 5.2 seconds, blue


def test_time_left_forgets_old_steps():
    stream = io.StringIO()
    console = Console(stream)
    console.step(make_record(1, 0.0, 1000.0), 21)
    for step in range(2, 12):
        console.step(make_record(step, 0.0, 2.0), 21)
    assert stream.getvalue().splitlines()[-1].endswith("left 20s")


def test_no_escape_sequences_without_a_terminal(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    stream = io.StringIO()
    console = Console(stream)
    console.start({"model": "a [bold]model[/bold] " + "x" * 200, "steps": 50})
    with console.phase("generate") as show:
        show(1, 2)
    console.warn("careful")
    console.step(make_record(1, 0.5, 2.0), 2)
    answer = "\x1b[31mred\x1b[0m \\boxed{circle}"
    sample = Sample(
        1, "val", "r:0", "<|im_start|>user What shape?<|im_end|>", answer, "circle", {"overall": 1.0}, None, 5, "stop"
    )
    console.finish({"sampled": 0.284}, {"sampled": 0.724, "shuffled": 0.2}, [sample] * 7, "checkpoints/a/b")
    text = stream.getvalue()
    assert "\x1b" not in text and "\r" not in text and "generate" not in text
    lines = text.splitlines()
    assert lines[1] == "  model  a [bold]model[/bold] " + "x" * 200  # neither read as markup nor wrapped
    assert "warning: careful" in lines
    assert lines[-2:] == ["report: checkpoints/a/b/report.html", "run folder: checkpoints/a/b"]
    assert [line.split() for line in lines if line.split()[:1] in (["sampled"], ["shuffled"])] == [
        ["sampled", "0.284", "0.724", "+0.440"],
        ["shuffled", "-", "0.200", "-"],
    ]
    rows = [line for line in lines if "What shape?" in line]
    assert len(rows) == 5
    assert all("circle" in row and "1.000" in row and "<|" not in row for row in rows)


def test_an_output_without_unicode_is_no_error():
    raw = io.BytesIO()
    console = Console(io.TextIOWrapper(raw, encoding="ascii", write_through=True))
    sample = Sample(1, "val", "r:0", "\u4e2d", "\u5706 circle", "circle", {"overall": 0.0}, None, 5, "stop")
    console.finish({}, {"greedy": 0.5}, [sample], "run")
    assert b"? circle" in raw.getvalue()


def test_a_terminal_shows_the_phase_and_takes_it_away():
    stream = Terminal()
    console = Console(stream)
    with console.phase("generate") as show:
        show(3, 8)
    text = stream.getvalue()
    assert "generate  3/8 ..." in text and "━" * 9 in text and "─" * 15 in text
    assert text.endswith("\x1b[2K")  # the live line is erased


def test_a_disabled_console_is_silent():
    stream = Terminal()
    console = Console(stream, enabled=False)
    console.start({"model": "x"})
    with console.phase("generate"):
        console.note("text")
    console.step(make_record(1, 0.5, 2.0), 2)
    console.finish({}, {}, [], "run")
    assert stream.getvalue() == ""


def test_a_trend_has_a_block_for_each_value():
    assert (draw_trend([0, 1, 0.5]), draw_trend([2, 2])) == ("▁█▅", "▅▅")


def test_seconds_as_people_say_them():
    assert [format_seconds(value) for value in (0.4, 59.6, 190, 3725)] == ["0s", "1m00s", "3m10s", "1h02m"]
