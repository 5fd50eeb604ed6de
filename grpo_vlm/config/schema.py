"""The configuration: EasyR1's sections, key names and dataclass defaults, each key with its help and its state.

Defaults that differ from EasyR1's, so that launcher and machine decide: worker.rollout.tensor_parallel_size null (1),
worker.rollout.dtype auto, trainer.logger [console, file, tensorboard], trainer.nnodes and n_gpus_per_node null.
Keys of our own: data.system_prompt, data.num_workers, and what places, watches and checks worker.rollout's
server.
The worker's sections are in schema_actor.py and schema_rollout.py.
"""

from dataclasses import dataclass

from grpo_vlm.config.options import at_least, off_or_at_least, option, planned, section
from grpo_vlm.config.schema_actor import ActorConfig, CriticConfig, RefConfig
from grpo_vlm.config.schema_rollout import RewardConfig, RolloutConfig

_VIDEO = "videos arrive with the video work; use rows with images"
_ALGORITHMS = "arrives with the algorithms work; this version has grpo"
_TRACKERS = "arrives with the trackers work; use console, file or tensorboard"
_FILTERING = "online filtering arrives with the algorithms work"
_RAY = "there is no Ray here"


@dataclass
class DataConfig:
    """The rows: where they are, how they become prompts, and how many a step takes."""

    train_files: str = option(
        "",
        "Training rows, one PATH[@split]: a parquet, json or jsonl file, a folder, or a hub id. Default split: train.",
        common=True,
        example="data/easyvqa/train.parquet",
    )
    val_files: str = option(
        "", "Validation rows, in the same form. Empty: no validation.", common=True, example="hiyouga/geometry3k@test"
    )
    prompt_key: str = option("prompt", "Column with the question; each <image> in it stands for one image.")
    answer_key: str = option("answer", "Column with the right answer; the reward function gets it as ground_truth.")
    image_key: str = option("images", "Column with the list of images (bytes, {bytes, path}, path or PIL).")
    video_key: str = planned("videos", "Column with the list of videos.", _VIDEO)
    image_dir: str | None = option(None, "Folder that relative image paths start from. null: the working directory.")
    video_fps: float = planned(2.0, "Frames per second taken from a video.", _VIDEO)
    max_prompt_length: int = option(
        512, "Longest prompt in tokens, image tokens counted after expansion.", rule=at_least(1), common=True
    )
    max_response_length: int = option(
        512, "Longest response in tokens; generation stops there.", rule=at_least(1), common=True
    )
    rollout_batch_size: int = option(512, "Prompts per rollout step, over all devices.", rule=at_least(1), common=True)
    mini_rollout_batch_size: int | None = planned(
        None, "Prompts per generation call while a filtered batch is being filled.", _FILTERING
    )
    val_batch_size: int = option(
        -1, "Prompts per validation batch, over all devices. -1: the whole set at once.", rule=off_or_at_least(1)
    )
    format_prompt: str | None = option(
        None,
        "Jinja file that wraps the question, its variable is `content`. null: the question as it is.",
        common=True,
        example="configs/prompts/boxed.jinja",
    )
    override_chat_template: str | None = option(
        None, "File whose text replaces the chat template of the tokenizer and the processor."
    )
    system_prompt: str | None = option(None, "Text of a system message before the question. null: none of ours.")
    shuffle: bool = option(True, "Draw the rows in a new random order each epoch; false: in file order.")
    seed: int = option(1, "Seed of the row order.", rule=at_least(0))
    min_pixels: int = option(262144, "Images with fewer pixels are enlarged to this.", rule=at_least(1))
    max_pixels: int = option(4194304, "Images with more pixels are shrunk to this.", rule=at_least(1))
    filter_overlong_prompts: bool = option(
        True,
        "Drop rows whose prompt exceeds max_prompt_length (the count is printed); false: they are an error.",
    )
    filter_overlong_prompts_workers: int = option(
        16, "Threads that measure prompts, at most the number of cores.", rule=at_least(1)
    )
    num_workers: int | None = option(
        None,
        "Processes that decode and process the images of the next rollout step during this one, for each training "
        "process. 0: the training process does it when it needs them. null: 0 on one or two cores, else the cores "
        "of a training process, at most 4.",
        rule=at_least(0),
    )


@dataclass
class AlgorithmConfig:
    """Advantages and the KL penalty."""

    gamma: float = planned(1.0, "Discount of later rewards (token-level estimators).", _ALGORITHMS)
    lam: float = planned(1.0, "Lambda of the generalised advantage estimate.", _ALGORITHMS)
    adv_estimator: str = option(
        "grpo",
        "How rewards become advantages: grpo = (reward - group mean) / (group std + 1e-6).",
        choices=("grpo",),
        refused=dict.fromkeys(
            ("gae", "rloo", "remax", "reinforce_plus_plus", "grpo_passk", "opo", "gdpo"), _ALGORITHMS
        ),
    )
    disable_kl: bool = option(False, "No reference model and no KL term at all.", common=True)
    use_kl_loss: bool = option(False, "true: the KL term is in the loss; false: it is subtracted from the reward.")
    kl_penalty: str = option(
        "kl",
        "Estimator of the KL term: kl (k1), abs, mse (k2), low_var_kl (k3).",
        choices=("kl", "abs", "mse", "low_var_kl"),
        refused={"full": "needs the log-probabilities of the whole vocabulary, which are not kept"},
    )
    kl_coef: float = option(1e-3, "Weight of the KL term.", rule=at_least(0), common=True)
    kl_type: str = option("fixed", "Course of kl_coef.", choices=("fixed",), refused={"adaptive": _ALGORITHMS})
    kl_horizon: float = planned(10000.0, "Horizon of the adaptive KL weight in samples.", _ALGORITHMS)
    kl_target: float = planned(0.1, "Target of the adaptive KL weight.", _ALGORITHMS)
    online_filtering: bool = planned(
        False, "Drop groups whose mean score is too low or too high, and refill.", _FILTERING
    )
    filter_key: str = planned("overall", "Score that online filtering looks at.", _FILTERING)
    filter_low: float = planned(0.01, "Online filtering keeps group means above this.", _FILTERING)
    filter_high: float = planned(0.99, "Online filtering keeps group means below this.", _FILTERING)


@dataclass
class WorkerConfig:
    """What EasyR1 calls workers: the policy, its generation engine, the reference model and the reward."""

    hybrid_engine: bool = option(
        True, "Training and generation share the devices; there is no other way.", choices=(True,)
    )
    actor: ActorConfig = section(ActorConfig)
    rollout: RolloutConfig = section(RolloutConfig)
    ref: RefConfig = section(
        RefConfig, reason="the reference model follows the policy's settings; sharding comes from accelerate_configs/"
    )
    critic: CriticConfig = section(
        CriticConfig, reason="only gae has a critic, and it arrives with the algorithms work"
    )
    reward: RewardConfig = section(RewardConfig)


@dataclass
class TrainerConfig:
    """How long to train, what to log, when to validate and save. All counts are rollout steps."""

    total_epochs: int = option(15, "Passes over the training rows. Not used when max_steps is set.", rule=at_least(1))
    max_steps: int | None = option(
        None,
        "Rollout steps to train; replaces total_epochs. null: total_epochs decides.",
        rule=at_least(1),
        common=True,
    )
    project_name: str = option("easy_r1", "First part of the default run folder, which is all that it names.")
    experiment_name: str = option("demo", "Second part of the default run folder.")
    logger: list[str] = option(
        ["console", "file", "tensorboard"],
        "Where metrics go. metrics.jsonl and samples.jsonl are always written: file is always on.",
        choices=("console", "file", "tensorboard"),
        refused=dict.fromkeys(("wandb", "swanlab", "mlflow"), _TRACKERS),
    )
    nnodes: int | None = option(
        None, "Machines. null: the launcher's number; set and different from it: an error.", rule=at_least(1)
    )
    n_gpus_per_node: int | None = option(
        None,
        "Processes per machine. null: the launcher's number; set and different from it: an error.",
        rule=at_least(1),
    )
    max_try_make_batch: int = planned(
        20, "Generation rounds before a filtered batch that is not full is an error.", _FILTERING
    )
    critic_warmup: int = planned(0, "Steps that train only the critic.", _ALGORITHMS)
    val_freq: int = option(
        -1, "Validate every so many steps. -1: only before and after training.", rule=off_or_at_least(1), common=True
    )
    val_before_train: bool = option(True, "Validate before the first step.")
    val_only: bool = option(False, "Validate once and stop.")
    val_generations_to_log: int = option(
        0,
        "Answers to held-out rows shown at the end of the run and, per validation, in TensorBoard.",
        rule=at_least(0),
    )
    save_freq: int = option(
        -1, "Save every so many steps. -1: only after the last.", rule=off_or_at_least(1), common=True
    )
    save_limit: int = option(-1, "Checkpoints kept; the best one is always kept. -1: all.", rule=off_or_at_least(1))
    save_model_only: bool = option(False, "Save no optimizer state; such a checkpoint cannot be resumed.")
    save_checkpoint_path: str | None = option(None, "Run folder. null: checkpoints/PROJECT/EXPERIMENT.")
    load_checkpoint_path: str | None = option(
        None, "Checkpoint folder global_step_N to continue from.", example="checkpoints/easy_r1/demo/global_step_25"
    )
    ray_timeline: str | None = planned(None, "File for Ray's timeline.", _RAY)
    find_last_checkpoint: bool = option(True, "Continue from the last checkpoint in the run folder when there is one.")


@dataclass
class Config:
    """The whole configuration. Sections may be changed in place; `check_config` tells whether the result is sound."""

    data: DataConfig = section(DataConfig)
    worker: WorkerConfig = section(WorkerConfig)
    algorithm: AlgorithmConfig = section(AlgorithmConfig)
    trainer: TrainerConfig = section(TrainerConfig)
