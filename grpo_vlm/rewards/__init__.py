"""Reward functions: load what the user wrote and call it in the form it was written for, in worker processes.

Grading answers is grade.py's, which only those import who use it: every worker imports this package.
"""

from grpo_vlm.rewards.loader import Reward, RewardSample, load_reward

__all__ = ["Reward", "RewardSample", "load_reward"]
