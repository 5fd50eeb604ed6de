"""Reward functions: load what the user wrote and call it in the form it was written for."""

from grpo_vlm.rewards.loader import Reward, RewardSample, load_reward

__all__ = ["Reward", "RewardSample", "load_reward"]
