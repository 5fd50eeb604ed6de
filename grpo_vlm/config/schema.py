"""The configuration: EasyR1's sections, key names and dataclass defaults, each key with its help and its state.

Defaults that differ from EasyR1's, so that launcher and machine decide: worker.rollout.tensor_parallel_size null (1),
worker.rollout.dtype auto, trainer.logger [console, file, tensorboard], trainer.nnodes and n_gpus_per_node null.
Keys of our own: data.allow_empty_answer, allow_remote_media, on_bad_media, system_prompt, num_workers and the bounds
of videos, and what places, watches and checks worker.rollout's server.
The worker's sections are in schema_actor.py and schema_rollout.py.
"""

from dataclasses import dataclass

from grpo_vlm.config.options import NEUTRAL, above, above_to, at_least, neutral, off_or_at_least, option, section
from grpo_vlm.config.schema_actor import ActorConfig, CriticConfig, RefConfig
from grpo_vlm.config.schema_algorithm import AlgorithmConfig
from grpo_vlm.config.schema_rollout import RewardConfig, RolloutConfig
from grpo_vlm.config.trackers import TRACKERS

_RAY = "there is no Ray here"


@dataclass
class DataConfig:
    """The rows: where they are, how they become prompts, and how many a step takes."""

    train_files: str = option(
        "",
        "Training rows, PATH[@split] or several with commas between: a parquet, json or jsonl file, a folder, a URL "
        "(s3://, hdfs:// ...) or a hub id. Default split: train.",
        common=True,
        example="data/easyvqa/train.parquet",
    )
    val_files: str | None = option(
        "",
        "Validation rows, in the same form. Empty or null: no validation.",
        common=True,
        example="hiyouga/geometry3k@test",
    )
    prompt_key: str = option(
        "prompt",
        "Column with the question, as text or as chat messages; each <image> and <video> in it stands for the next "
        "one of the row (\\<image> is the word). Where the rows lack it: messages, problem or question.",
    )
    answer_key: str | None = option(
        None,
        "Column with the right answer (a.b: field b of a struct); the reward function gets it as ground_truth. null: "
        "the first there is of reward_model.ground_truth, answer, solution, ground_truth.",
    )
    allow_empty_answer: bool = option(
        False,
        "Take rows whose answer is empty, for a reward that does not read ground_truth; false: they are an error.",
    )
    image_key: str = option(
        "images",
        "Column with the image or list of images (path, bytes, {bytes, path}, base64, data URI or PIL). Where the "
        "rows lack it: image.",
    )
    video_key: str = option(
        "videos",
        "Column with the video or list of videos: path, bytes, a list of frames, or {video, fps, max_frames, ...}, "
        "whose settings come before the ones below. Where the rows lack it: video.",
    )
    image_dir: str | None = option(
        None, "Folder that relative image and video paths start from. null: the working directory."
    )
    allow_remote_media: bool = option(
        False, "Fetch images and videos that are http(s) links, each time they are used."
    )
    on_bad_media: str = option(
        "error",
        "Rows with an image or video that cannot be used: error = no training, all of them listed; skip = left out, "
        "counted and listed in the run folder.",
        choices=("error", "skip"),
    )
    video_fps: float = option(2.0, "Frames taken per second of video.", rule=above_to(0, 1000))
    video_min_frames: int = option(4, "Fewest frames taken from a video that has as many.", rule=at_least(2))
    video_max_frames: int = option(768, "Most frames taken from a video.", rule=at_least(2))
    video_min_pixels: int | None = option(
        None, "Frames with fewer pixels are enlarged to this. null: min_pixels.", rule=at_least(1)
    )
    video_max_pixels: int | None = option(
        None, "Frames with more pixels are shrunk to this, at most 768 tokens. null: max_pixels.", rule=at_least(1)
    )
    video_total_pixels: int | None = option(
        None,
        "Pixels that the frames of a video share, two frames counting as one. null: 115200 tokens.",
        rule=at_least(1),
    )
    max_prompt_length: int = option(
        512, "Longest prompt in tokens, image tokens counted after expansion.", rule=at_least(1), common=True
    )
    max_response_length: int = option(
        512, "Longest response in tokens; generation stops there.", rule=at_least(1), common=True
    )
    rollout_batch_size: int = option(512, "Prompts per rollout step, over all devices.", rule=at_least(1), common=True)
    mini_rollout_batch_size: int | None = option(
        None,
        "Prompts per round of generation while online filtering fills a batch. null: rollout_batch_size.",
        rule=at_least(1),
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
    system_prompt: str | None = option(
        None, "Text of a system message before the question, in the place of the row's own. null: none of ours."
    )
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
class WorkerConfig:
    """What EasyR1 calls workers: the policy, its generation engine, the reference model and the reward."""

    hybrid_engine: bool = option(
        True, "Training and generation share the devices; there is no other way.", choices=(True,)
    )
    actor: ActorConfig = section(ActorConfig)
    rollout: RolloutConfig = section(RolloutConfig)
    ref: RefConfig = section(
        RefConfig,
        status=NEUTRAL,
        reason="the reference model follows the policy's settings; sharding comes from accelerate_configs/",
    )
    critic: CriticConfig = section(
        CriticConfig,
        status=NEUTRAL,
        reason="only adv_estimator gae has a critic, and this version has neither",
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
    project_name: str = option(
        "easy_r1", "First part of the default run folder; the project at a service of trainer.logger."
    )
    experiment_name: str = option(
        "demo", "Second part of the default run folder; the run's name at a service of trainer.logger."
    )
    logger: list[str] = option(
        ["console", "file", "tensorboard"],
        "Where metrics go. The files of the run folder and report.html are always written: file is always on. wandb, "
        "swanlab, mlflow and trackio need their packages (pip install NAME).",
        choices=TRACKERS,
    )
    nnodes: int | None = option(
        None, "Machines. null: the launcher's number; set and different from it: an error.", rule=at_least(1)
    )
    n_gpus_per_node: int | None = option(
        None,
        "Processes per machine. null: the launcher's number; set and different from it: an error.",
        rule=at_least(1),
    )
    max_try_make_batch: int = option(
        20, "Rounds of generation before a filtered batch that is not full is an error. 0 or less: no limit."
    )
    critic_warmup: int = neutral(0, "Steps that train only the critic.", "there is no critic")
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
    save_merged: bool = option(
        True,
        "With LoRA: write the merged model beside the adapter. false: the adapter alone; grpo-vlm export RUN --merge "
        "merges it afterwards.",
    )
    save_in_background: bool = option(
        True,
        "Copy a checkpoint to host memory and write it while training goes on. false: training waits, and 4 GiB of "
        "host memory are enough.",
    )
    collective_timeout_s: float = option(
        1800.0,
        "Seconds that a rank may stand still in an update, in log-probs or in a checkpoint; then the run ends and "
        "names the ranks, their phases and rows.",
        rule=above(0),
    )
    save_checkpoint_path: str | None = option(None, "Run folder. null: checkpoints/PROJECT/EXPERIMENT.")
    load_checkpoint_path: str | None = option(
        None, "Checkpoint folder global_step_N to continue from.", example="checkpoints/easy_r1/demo/global_step_25"
    )
    ray_timeline: str | None = neutral(None, "File for Ray's timeline.", _RAY)
    find_last_checkpoint: bool = option(True, "Continue from the last checkpoint in the run folder when there is one.")


@dataclass
class Config:
    """The whole configuration. Sections may be changed in place; `check_config` tells whether the result is sound."""

    data: DataConfig = section(DataConfig)
    worker: WorkerConfig = section(WorkerConfig)
    algorithm: AlgorithmConfig = section(AlgorithmConfig)
    trainer: TrainerConfig = section(TrainerConfig)
