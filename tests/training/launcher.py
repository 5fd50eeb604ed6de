"""The variables of a process that `accelerate launch` starts with a file of accelerate_configs/, made by Accelerate
itself."""

from pathlib import Path

from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env, prepare_simple_launcher_cmd_env

CONFIGS = Path(__file__).parents[2] / "accelerate_configs"
RANKS = 2


def environment(scheme: str, rank: int, port: int) -> dict[str, str]:
    """What `accelerate launch --config_file accelerate_configs/SCHEME.yaml --num_processes 2` gives a process."""
    command = ["--config_file", str(CONFIGS / f"{scheme}.yaml"), "--main_process_port", str(port)]
    if scheme in ("cpu", "single_gpu"):
        args, *_ = _validate_launch_command(launch_command_parser().parse_args([*command, "train.py"]))
        return prepare_simple_launcher_cmd_env(args)[1]
    command += ["--num_processes", str(RANKS), "train.py"]
    args, defaults, _ = _validate_launch_command(launch_command_parser().parse_args(command))
    if args.use_deepspeed:
        args.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
        found = prepare_deepspeed_cmd_env(args)[1]
    else:
        found = prepare_multi_gpu_env(args)
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS}
    found |= {name: str(value) for name, value in ranks.items()}
    return found | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
