"""What a run tells: records of its steps, its folder, its console and its trackers. Watches and decides nothing."""

from grpo_vlm.report.record import Sample, StepRecord
from grpo_vlm.report.run_folder import RunFolder, checkpoint_steps, last_checkpoint

__all__ = ["RunFolder", "Sample", "StepRecord", "checkpoint_steps", "last_checkpoint"]
