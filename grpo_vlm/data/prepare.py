"""Writes ready-made data sets as parquet: `grpo-vlm prepare geo3k --out data/geo3k`.

Raw rows come from the Hugging Face hub (ModelScope with USE_MODELSCOPE_HUB=1) or from --local_dataset_path; the result
goes to a folder or to any URL that fsspec knows. The same rows and seed give the same files, byte for byte.
"""

import argparse
import sys
from collections.abc import Sequence

from grpo_vlm.config.locations import scheme_of
from grpo_vlm.data import (
    prepare_clevr,
    prepare_easyvqa,
    prepare_geo3k,
    prepare_openr1mm,
    prepare_tinyllava_video,
)
from grpo_vlm.data.prepare_easyvqa import easyvqa_rows
from grpo_vlm.data.prepared import Recipe, write_split
from grpo_vlm.data.remote import file_system
from grpo_vlm.errors import GRPOVLMError

__all__ = ["RECIPES", "easyvqa_rows", "main"]

RECIPES: dict[str, Recipe] = {
    "geo3k": prepare_geo3k,
    "openr1mm": prepare_openr1mm,
    "tinyllava_video": prepare_tinyllava_video,
    "easyvqa": prepare_easyvqa,
    "clevr": prepare_clevr,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line entry; returns the exit code."""
    parser = argparse.ArgumentParser(prog="grpo-vlm prepare", description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="name", required=True)
    for name, recipe in RECIPES.items():
        command = commands.add_parser(name, help=recipe.HELP, description=recipe.__doc__)
        command.add_argument(
            "--out",
            "--local_save_dir",
            "--local_dir",
            dest="out",
            required=True,
            help="folder or URL (s3://, hdfs:// ...) for train.parquet and test.parquet",
        )
        command.add_argument("--hdfs_dir", help="second folder or URL to write the files to")
        command.add_argument("--local_dataset_path", help="raw data: a file or folder, instead of the hub")
        recipe.add_arguments(command)
    options = parser.parse_args(arguments)
    targets = [target for target in (options.out, options.hdfs_dir) if target]
    try:
        for target in filter(scheme_of, targets):
            file_system(target)  # before anything is downloaded and written: its driver may be absent
        for split, rows in RECIPES[options.name].splits(options).items():
            count, written = write_split(rows, targets, split)
            for address in written:
                print(f"{address}: {count} rows")
    except GRPOVLMError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
