"""The loader's benchmark at a small size: both sides do the same step, and its counts are what they must be."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from benchmarks import loader
from benchmarks.measure import Result

ROOT = Path(__file__).parents[2]
GEO3K = ROOT / "tests" / "data" / "geo3k_40.parquet"


def test_pictures_are_decoded_once_a_step_and_by_trl_again_and_again(tmp_path):
    out = tmp_path / "loader.json"
    command = [
        sys.executable,
        "benchmarks/loader.py",
        "speed",
        "--data",
        str(GEO3K),
        "--out",
        str(out),
        "--steps",
        "1",
    ]
    command += ["--batch", "4", "--accumulation", "4", "--group", "4"]
    run = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=280
    )
    assert run.returncode == 0, run.stdout + run.stderr
    written = json.loads(out.read_text())
    (ours,), (trl,) = written["ours"]["steps"], written["trl"]["steps"]
    assert ours["images"] == trl["images"] == ours["decodes"] == 4
    assert trl["decodes"] >= 4 * 4 * 4  # each picture for each answer in each micro-batch
    assert written["ours"]["check"] | {"seconds": 0} == {"rows": 40, "decodes": 40, "seconds": 0}
    assert written["summary"]["decodes_fewer"] == trl["decodes"] / 4


def test_memory_is_watched_while_a_made_up_set_is_checked_and_drawn(tmp_path, monkeypatch):
    monkeypatch.setenv("GRPO_VLM_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "noise.parquet"
    assert loader.write_noise(file, 40e6, 30) == pq.read_metadata(file).num_rows == 67
    assert file.stat().st_size == pytest.approx(40e6, rel=0.05)
    result = Result(tmp_path / "result.json")
    loader.measure_ours(argparse.Namespace(data=file), result)
    assert result.values["rows"] == result.values["kept"] == 67 and result.values["drawn"] == 32
    assert [step["phase"] for step in result.values["steps"]] == ["open", "check", "draw"]
    assert result.values["memory"]["peak_gb"] > result.values["memory"]["before_gb"] > 0.1
