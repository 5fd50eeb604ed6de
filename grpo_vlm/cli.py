"""The command line: `grpo-vlm train` is train.py, `grpo-vlm prepare` writes data sets.

Exit codes: 0 done; 1 a fault of ours or of the machine, with its traceback, or a generation engine that is lost, said
in one message; 2 something to mend in the command, the configuration, the data or the reward, said in one message; 130
interrupted.
"""

import argparse
import sys
from collections.abc import Callable, Sequence

from grpo_vlm.config.help import format_help
from grpo_vlm.errors import ConfigError, GRPOVLMError, RolloutError

USAGE = """usage: grpo-vlm train [--config FILE] [key=value ...]
       grpo-vlm prepare easyvqa --out DIR

One process: `grpo-vlm train`. Several: accelerate launch --config_file accelerate_configs/NAME.yaml train.py with the
same arguments.
"""


def train(arguments: Sequence[str]) -> None:
    """Parse -> check -> run. `arguments` are `--config FILE` and `key=value` items; `--help` lists the keys."""
    parser = argparse.ArgumentParser(prog="train.py", add_help=False, allow_abbrev=False)
    parser.add_argument("--config", metavar="FILE", action="append", default=[])
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    options = parser.parse_intermixed_args(arguments)
    if options.help:
        print(f"{USAGE}\n{format_help()}")
        return
    files = options.config + [item for item in options.overrides if item.startswith("config=")]
    if len(options.config) < len(files):
        raise ConfigError(f"{files[-1]}: a configuration file is named by --config {files[-1].partition('=')[2]}")
    if len(files) > 1:
        raise ConfigError(
            f"--config is given {len(files)} times ({', '.join(files)}); put what they share in one file"
        )
    from grpo_vlm.run import Run  # not needed to print the help

    Run(files[0] if files else {}, options.overrides).train()


def prepare(arguments: Sequence[str]) -> int:
    """Writes a data set as parquet."""
    from grpo_vlm.data.prepare import main as write

    return write(arguments)


COMMANDS: dict[str, Callable[[Sequence[str]], int | None]] = {"train": train, "prepare": prepare}


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
