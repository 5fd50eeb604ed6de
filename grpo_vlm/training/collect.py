"""Prompts -> completions -> scores. Training and validation both collect through here."""

from collections.abc import Callable, Sequence
from typing import Any

from accelerate import Accelerator

from grpo_vlm.config import Config, sampling_values
from grpo_vlm.data.rows import Prompt
from grpo_vlm.errors import RewardError
from grpo_vlm.rewards.forms import RewardSample
from grpo_vlm.rewards.pool import RewardPool
from grpo_vlm.rollout.engine import Engine
from grpo_vlm.rollout.ranks import raise_first
from grpo_vlm.rollout.types import Completion, Request, Sampling, request_seed
from grpo_vlm.training.batch import Group


def sampling(config: Config, *, validation: bool = False) -> Sampling:
    """How training rollouts, or validation answers under `worker.rollout.val_override_config`, are drawn."""
    return Sampling(**sampling_values(config, validation=validation), ignore_eos=config.worker.rollout.ignore_eos)


def reward_sample(prompt: Prompt, response: str, token_ids: tuple[int, ...]) -> RewardSample:
    """What the reward sees of one answer to a prompt."""
    return RewardSample(
        row_id=prompt.row_id,
        response=response,
        response_length=len(token_ids),
        token_ids=token_ids,
        ground_truth=prompt.ground_truth,
        prompt_messages=prompt.messages,
        prompt_text=prompt.text,
        columns=prompt.columns,
        images=prompt.images,
    )


class Collector:
    """Generates with the engine and scores with the reward; knows nothing of training."""

    def __init__(self, config: Config, engine: Engine, reward: RewardPool, tokenizer: Any, accelerator: Accelerator):
        self.engine, self.reward, self.tokenizer, self.accelerator = engine, reward, tokenizer, accelerator
        self.seed = config.worker.rollout.seed
        self.skip_special_tokens = config.worker.reward.skip_special_tokens

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        *,
        step: int,
        purpose: str,
        on_progress: Callable[[int], None] | None = None,
    ) -> list[list[Completion]]:
        """`sampling.n` completions for each prompt, in the order of `prompts`. The seed of a request depends on the
        run's seed, the step, the row and the purpose alone."""
        requests = [
            Request(prompt, sampling, request_seed(self.seed, step, prompt.row_id, purpose)) for prompt in prompts
        ]
        return self.engine.generate(requests, on_progress)

    def score(
        self, prompts: Sequence[Prompt], completions: Sequence[Sequence[Completion]], places: Sequence[int]
    ) -> list[Group]:
        """Calls the reward once with all samples of this rank; a sample that it leaves unscored has None for a score.
        A RewardError of one rank is raised on all. `places` number the prompts over all ranks."""
        samples = [
            reward_sample(prompt, self.text(completion), completion.token_ids)
            for prompt, row in zip(prompts, completions, strict=True)
            for completion in row
        ]
        error, found = None, []
        try:
            found = self.reward(samples) if samples else []
        except RewardError as problem:
            error = str(problem)
        raise_first(error, self.accelerator, RewardError)
        scores = iter(found)
        return [
            Group(prompt, tuple(row), tuple(next(scores) for _ in row), place)
            for prompt, row, place in zip(prompts, completions, places, strict=True)
        ]

    def text(self, completion: Completion) -> str:
        """The answer as the reward reads it."""
        return self.tokenizer.decode(completion.token_ids, skip_special_tokens=self.skip_special_tokens)
