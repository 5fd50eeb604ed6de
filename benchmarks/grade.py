"""Times the grader beside a serial loop over math-verify on one machine, in one run, on the same completions.

    python benchmarks/grade.py --out FILE.json

512 golds of Geometry3K with 5 completions each, as a policy gives them: the gold in a box, its value in another
spelling, one of the other options, a rounded value, and a completion cut off before its answer. Besides the
seconds the JSON has how many verdicts each got wrong: a fast wrong grader is no gain. Each is warmed with the golds
left over, so that no answer is graded from a cache.
"""

import argparse
import importlib.metadata
import json
import random
import sys
import time
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

from math_verify import parse as read_formula
from math_verify import verify

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.summary import write_json
from benchmarks.train_steps import hardware, versions
from grpo_vlm.rewards.grade import grade
from grpo_vlm.rewards.grade_answers import read
from grpo_vlm.rewards.grade_spelling import clean
from grpo_vlm.rewards.grade_values import evaluate

ROOT = Path(__file__).resolve().parents[1]
GOLDS = ROOT / "tests/data/geo3k_answers.jsonl"
THOUGHT = "The sides give an equation, $a^2 + b^2 = c^2$, so with $a = {a}$ we get $b = {b}$. "
THOUGHTS = 12  # sentences before an answer
EXACT = ("frac", "sqrt", "pi")


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=512)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    return parser.parse_args()


Work = list[tuple[str, str, bool]]  # completion, gold, right verdict


def completions(prompts: int, seed: int) -> tuple[Work, Work]:
    """Five completions for each of `prompts` golds, and for each of the golds left over."""
    rng = random.Random(seed)
    rows = [json.loads(line) for line in GOLDS.open(encoding="utf-8")]
    rng.shuffle(rows)
    work = [completion for row in rows for completion in _of_a_policy(row, rng)]
    return work[: 5 * prompts], work[5 * prompts :]


def _of_a_policy(row: dict[str, Any], rng: random.Random) -> Work:
    gold = row["answer"]
    thought = "".join(THOUGHT.format(a=rng.randrange(99), b=rng.randrange(99)) for _ in range(THOUGHTS))
    other = rng.choice([c for i, c in enumerate(row["choices"]) if i != ord(row["letter"]) - ord("A")])
    rounded, is_exact = _rounded(row)
    return [
        (f"<think>{thought}</think>\nThe answer is \\boxed{{{gold}}}.", gold, True),
        (f"<think>{thought}</think>\n\\boxed{{{_respelled(gold)}}}", gold, True),
        (f"<think>{thought}</think>\nSo it is \\boxed{{{other}}}.", gold, False),
        (f"<think>{thought}</think>\n\\boxed{{{rounded}}}", gold, is_exact),
        (f"<think>{thought}", gold, False),
    ]


def _respelled(gold: str) -> str:
    tight = gold.replace("{ ", "{").replace(" }", "}").replace("\\frac", "\\dfrac")
    return f"x = {tight}" if tight == gold and gold.replace(".", "").isdigit() else tight


def _rounded(row: dict[str, Any]) -> tuple[str, bool]:
    """The value with two decimals, and whether that is still the gold; of what is no exact number another one."""
    if row["kind"] not in EXACT:
        return f"{row['answer']}9", False
    value = evaluate(read(clean(row["answer"])).node)
    rounded = f"{float(value):.2f}"
    return rounded, isinstance(value, Fraction) and Fraction(rounded) == value


def math_verify(completion: str, gold: str) -> bool:
    """As its documentation calls it, with its own timers, which need the main thread."""
    return verify(read_formula(f"${gold}$"), read_formula(completion))


def timed(grader: Callable[[str, str], bool], work: Work) -> dict[str, float | int]:
    """Seconds for all of the work in this process, one after the other, and the verdicts that were wrong."""
    accepted = refused = 0
    begun, slowest_s = time.perf_counter(), 0.0
    for completion, gold, right in work:
        before = time.perf_counter()
        verdict = grader(completion, gold)
        slowest_s = max(slowest_s, time.perf_counter() - before)
        accepted += verdict and not right
        refused += right and not verdict
    seconds = time.perf_counter() - begun
    return {"seconds": seconds, "slowest_s": slowest_s, "wrongly_right": accepted, "wrongly_wrong": refused}


def main() -> None:
    """Warms both, times both, writes and prints the numbers."""
    options = parse()
    work, warm = completions(options.prompts, options.seed)

    def ours(completion: str, gold: str) -> bool:
        return grade(completion, gold).correct

    timed(ours, warm), timed(math_verify, warm)
    grader, library = timed(ours, work), timed(math_verify, work)
    result = {
        "command": " ".join([Path(sys.executable).name, *sys.argv]),
        "versions": versions()
        | {name: importlib.metadata.version(name) for name in ("math-verify", "mpmath", "sympy")},
        "hardware": hardware(),
        "workload": {"prompts": options.prompts, "gradings": len(work), "seed": options.seed},
        "grade": grader,
        "math_verify_serial": library,
        "times_as_fast": library["seconds"] / grader["seconds"],
    }
    write_json(options.out, result)
    for name in ("grade", "math_verify_serial"):
        print(f"{name:20}", {key: round(value, 4) for key, value in result[name].items()})
    print(f"{len(work)} gradings, {result['times_as_fast']:.1f} times as fast as math-verify")


if __name__ == "__main__":
    main()
