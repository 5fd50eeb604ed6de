"""Trains a vision-language model with GRPO.

    accelerate launch --config_file accelerate_configs/single_gpu.yaml train.py --config FILE [key=value ...]

`--help` lists every key. Exit codes: 0 done; 1 a fault of ours or of the machine, with its traceback; 2 something to
mend in the configuration, the data or the reward.
"""

import sys
from collections.abc import Sequence

from grpo_vlm.cli import guarded, train


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse -> check -> run. Returns the exit code."""
    return guarded(train, sys.argv[1:] if arguments is None else arguments)


if __name__ == "__main__":
    sys.exit(main())
