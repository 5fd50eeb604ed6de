"""The command line: `grpo-vlm train` is train.py, `grpo-vlm prepare` writes data sets, `grpo-vlm translate` shows what
a configuration of EasyR1 or verl becomes.

Exit codes: 0 done; 1 a fault of ours or of the machine, with its traceback, or a generation engine that is lost, said
in one message; 2 something to mend in the command, the configuration, the data or the reward, said in one message; 130
interrupted.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from grpo_vlm.config.help import format_help
from grpo_vlm.errors import ConfigError, GRPOVLMError, RolloutError
from grpo_vlm.launcher import end_with_launcher

USAGE = """usage: grpo-vlm train [--config FILE] [key=value ...]
       grpo-vlm train --dry-run [--gpu NAME] [--launch FILE] [--answer-tokens N] [--config FILE] [key=value ...]
       grpo-vlm doctor [--start] [--folder DIR]
       grpo-vlm prepare geo3k|openr1mm|tinyllava_video|easyvqa|clevr --out DIR
       grpo-vlm data check FILE [--config FILE] [key=value ...]
       grpo-vlm reward FILE:FUNCTION --data FILE [--completions FILE]
       grpo-vlm report RUN [RUN2 ...] [--out FILE]
       grpo-vlm export RUN --to DIR [--step N] [--merge] [--push ID]
       grpo-vlm translate FILE | key=value ...    (a configuration of EasyR1 or verl, as YAML)

One process: `grpo-vlm train`. Several: accelerate launch --config_file accelerate_configs/NAME.yaml train.py with the
same arguments.
"""


def train(arguments: Sequence[str]) -> None:
    """Parse -> check -> run. `arguments` are `--config FILE` and `key=value` items; `--help` lists the keys. EasyR1's
    and verl's command lines may be given as they are."""
    parser = argparse.ArgumentParser(prog="train.py", add_help=False, allow_abbrev=False)
    parser.add_argument("--config", metavar="FILE", action="append", default=[])
    parser.add_argument("--config-name", metavar="NAME", action="append", default=[])  # verl's, of Hydra
    parser.add_argument("--config-path", metavar="FOLDER", action="append", default=[])
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--gpu", metavar="NAME")
    parser.add_argument("--launch", metavar="FILE")
    parser.add_argument("--answer-tokens", metavar="N", type=int)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    options = parser.parse_intermixed_args(arguments)
    if options.help:
        print(f"{USAGE}\n{format_help()}")
        return
    from grpo_vlm.run import Run  # not needed to print the help

    overrides = [f"config={file}" for file in options.config] + options.overrides
    overrides += [f"hydra.config_name={name}" for name in options.config_name]
    overrides += [f"hydra.config_path={folder}" for folder in options.config_path]
    if options.dry_run:
        from grpo_vlm.dry_run import dry_run, launched_by

        with launched_by(options.launch):
            run = Run({}, overrides)
            if int(os.environ.get("RANK", 0)) == 0:
                dry_run(run.config, run.notices, gpu=options.gpu, answer_tokens=options.answer_tokens)
        return
    for name in ("gpu", "launch", "answer_tokens"):
        if getattr(options, name) is not None:
            raise ConfigError(f"--{name.replace('_', '-')}: goes with --dry-run only; add it, or leave this out")
    end_with_launcher()
    Run({}, overrides).train()


def prepare(arguments: Sequence[str]) -> int:
    """Writes a data set as parquet."""
    from grpo_vlm.data.prepare import main as write

    return write(arguments)


def data(arguments: Sequence[str]) -> int:
    """Reports what is in a data set and what is wrong with it."""
    from grpo_vlm.data.check import main as check
    from grpo_vlm.model.load import load_processor

    return check(arguments, load_processor)


def translate(arguments: Sequence[str]) -> None:
    """Prints a configuration of EasyR1 or verl as YAML for this package."""
    from grpo_vlm.config.translate import main as show

    show(arguments)


def reward(arguments: Sequence[str]) -> None:
    """Shows what a reward function makes of answers, and how long it takes."""
    from grpo_vlm.reward_trial import main as try_out

    try_out(arguments)


def report(arguments: Sequence[str]) -> None:
    """Writes one page with the curves, samples and settings of runs."""
    from grpo_vlm.report.page import main as write

    write(arguments)


def export(arguments: Sequence[str]) -> None:
    """Writes a checkpoint's model with a model card as a folder of its own, and perhaps to the hub."""
    from grpo_vlm.training.export import main as write

    write(arguments)


def doctor(arguments: Sequence[str]) -> int:
    """Says whether this machine can train."""
    from grpo_vlm.doctor import main as examine

    return examine(arguments)


COMMANDS: dict[str, Callable[[Sequence[str]], int | None]] = {
    "train": train,
    "prepare": prepare,
    "data": data,
    "translate": translate,
    "reward": reward,
    "report": report,
    "export": export,
    "doctor": doctor,
}


def guarded(command: Callable[[Sequence[str]], int | None], arguments: Sequence[str]) -> int:
    """Runs a command; a user's error is printed without a traceback. Returns the exit code."""
    try:
        return command(arguments) or 0
    except GRPOVLMError as error:
        print(f"\n{type(error).__name__}: {error}", file=sys.stderr)
        return 1 if isinstance(error, RolloutError) else 2
    except KeyboardInterrupt:
        print("\nInterrupted. The same command goes on from the last checkpoint.", file=sys.stderr)
        return 130


def main(arguments: Sequence[str] | None = None) -> int:
    """The console script `grpo-vlm`. Returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments or arguments[0] in ("-h", "--help"):
        print(f"{USAGE}\n{format_help()}")
        return 0
    if arguments[0] not in COMMANDS:
        print(f"{USAGE}\ngrpo-vlm: no command {arguments[0]!r}; known: {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    return guarded(COMMANDS[arguments[0]], arguments[1:])


if __name__ == "__main__":
    raise SystemExit(main())
