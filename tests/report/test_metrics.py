"""Metrics against values worked out by hand."""

import math

import pytest

from grpo_vlm.report import metrics


def test_reward_means_by_key():
    scores = [{"overall": 1.0, "format": 1.0}, {"overall": 0.0, "format": 1.0}, {"overall": 0.5}]
    assert metrics.reward_metrics(scores) == {"reward/overall": 0.5, "reward/format": 1.0}
    assert metrics.reward_metrics([]) == {}


def test_critic_takes_advantages_and_returns_over_all_tokens():
    spread = metrics.Spread
    advantages = [spread.of([2.0, 0.5, 0.5]), spread(-1.5, -1.0, 0.0), None]  # the last has no token
    returns = [spread(1.0, 2.0, 3.0), spread(-4.0, 0.0, 1.0), None]
    result = metrics.critic_metrics([1, 0, 0.5], [0.9, 0.1, 0.5], advantages, returns, [30, 10, 0])
    assert result == pytest.approx(
        {
            "critic/score/mean": 0.5,
            "critic/score/max": 1.0,
            "critic/score/min": 0.0,
            "critic/rewards/mean": 0.5,
            "critic/rewards/max": 0.9,
            "critic/rewards/min": 0.1,
            "critic/advantages/mean": 0.5,  # (30 - 10) / 40
            "critic/advantages/max": 2.0,
            "critic/advantages/min": -1.5,
            "critic/returns/mean": 1.5,  # 60 / 40
            "critic/returns/max": 3.0,
            "critic/returns/min": -4.0,
        }
    )
    assert metrics.critic_metrics([], [], [], [], []) == {}


def test_lengths_and_clip_ratio():
    result = metrics.length_metrics([4, 8, 8, 2], [10, 20], max_response_length=8, max_prompt_length=32)
    assert result == {
        "response_length/mean": 5.5,
        "response_length/max": 8.0,
        "response_length/min": 2.0,
        "response_length/clip_ratio": 0.5,
        "prompt_length/mean": 15.0,
        "prompt_length/max": 20.0,
        "prompt_length/min": 10.0,
        "prompt_length/clip_ratio": 0.0,
    }
    assert metrics.length_metrics([], [], max_response_length=8, max_prompt_length=8) == {}


def test_groups_without_variance():
    result = metrics.group_metrics([[1, 1, 1, 1], [0, 0, 0, 0], [1, 0, 1, 0], [0.5, 0.5, 0.5, 1.0]])
    assert result["group/zero_variance_share"] == 0.5
    assert result["group/reward_std"] == pytest.approx((0.5 + math.sqrt(3) / 8) / 4)
    assert result["group/reward_best"] == 0.75
    assert metrics.group_metrics([]) == metrics.group_metrics([[]]) == {}


def test_timing_per_token():
    result = metrics.timing_metrics(
        {"gen": 2.0, "update_actor": 3.0, "sync": 0.1}, response_tokens=400, total_tokens=1000
    )
    assert result == pytest.approx(
        {
            "timing_s/gen": 2.0,
            "timing_s/update_actor": 3.0,
            "timing_s/sync": 0.1,
            "timing_per_token_ms/gen": 5.0,
            "timing_per_token_ms/update_actor": 3.0,
        }
    )
    assert metrics.timing_metrics({"gen": 2.0}, response_tokens=0, total_tokens=0) == {"timing_s/gen": 2.0}


def test_throughput_leaves_out_validation_and_saving():
    seconds = {"gen": 4.0, "update_actor": 5.0, "validation": 7.0, "save_checkpoint": 3.0, "step": 20.0}
    result = metrics.perf_metrics(seconds, total_tokens=4000, num_rollouts=40, num_gpus=2, max_memory_allocated_gb=1.5)
    assert result["perf/time_per_step"] == 10.0
    assert result["perf/throughput"] == 200.0
    assert result["perf/rollouts_per_s_per_gpu"] == 2.0
    assert result["perf/generation_share"] == 0.4
    assert result["perf/total_num_tokens"] == 4000.0
    assert result["perf/max_memory_allocated_gb"] == 1.5 and "perf/max_memory_reserved_gb" not in result
    assert result["perf/cpu_memory_used_gb"] > 0
    del seconds["step"]
    assert metrics.training_seconds(seconds) == 9.0


def test_a_step_of_no_duration_has_no_throughput():
    result = metrics.perf_metrics({}, total_tokens=0, num_rollouts=0, num_gpus=1)
    assert "perf/throughput" not in result and all(math.isfinite(value) for value in result.values())


def test_seqlen_balance():
    assert metrics.seqlen_metrics([100, 140]) == {
        "global_seqlen/mean": 120.0,
        "global_seqlen/max": 140.0,
        "global_seqlen/min": 100.0,
        "global_seqlen/minmax_diff": 40.0,
    }
    assert metrics.seqlen_metrics([]) == {}


def test_validation_names():
    scores = [{"overall": 1.0, "accuracy": 1.0}, {"overall": 0.5, "accuracy": 0.0}]
    result = metrics.validation_metrics(scores, [3, 5], [7, 9], max_response_length=5, max_prompt_length=99)
    assert result["val/reward_score"] == result["val/overall_reward"] == 0.75
    assert result["val/accuracy_reward"] == 0.5
    assert result["val_response_length/clip_ratio"] == 0.5 and result["val_prompt_length/mean"] == 8.0
    assert metrics.validation_metrics([], [], [], max_response_length=5, max_prompt_length=5) == {}
