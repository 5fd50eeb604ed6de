"""Both forms of scoring on the same rollouts, on an accelerator (or a CPU, which proves the tests' own code only).

Models are made here, so that nothing but the package and its demo's tokenizer is needed.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.models import build_model, build_processor
from benchmarks.workload import Workload, answers, questions
from grpo_vlm.config import load_config
from grpo_vlm.data.dataset import PromptDataset
from grpo_vlm.model.packed import compile_layers, enable_packing
from grpo_vlm.rollout.types import Completion, banned_token_ids
from grpo_vlm.training.batch import Group, Padding, RolloutBatch
from grpo_vlm.training.scoring import Scorer, make_scorer


def device() -> torch.device:
    """The accelerator, or the CPU."""
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")


@dataclass(frozen=True)
class Scored:
    """log_probs and mask [B, T]; gradients by parameter name in the model's dtype; passes: forward passes made."""

    log_probs: Tensor
    mask: Tensor
    gradients: dict[str, Tensor]
    passes: int


def rollouts(workloads: list[Workload]) -> RolloutBatch:
    """One group per prompt of the workloads, one workload after the other: pictures and answers of several sizes."""
    processor, groups = build_processor(), []
    limit = max(workload.prompt_limit for workload in workloads)
    config = load_config(None, [f"data.max_prompt_length={limit}", "data.prompt_key=problem", "data.min_pixels=3136"])
    for workload in workloads:
        rows = PromptDataset([asked.row() for asked in questions(workload, workload.prompts)], config.data, processor)
        for number in range(workload.prompts):
            drawn = answers(workload, len(groups))
            made = tuple(Completion(tuple(ids), (0.0,) * len(ids), "length", "", 0) for ids in drawn)
            groups.append(Group(rows[number], made, tuple({"overall": 0.0} for _ in made)))
    return RolloutBatch.of(groups)


def score(
    name: str,
    dtype: torch.dtype,
    batch: RolloutBatch,
    *,
    packed: bool,
    row_tokens: int = 4096,
    micro: int = 4,
    compiled: bool = False,
) -> Scored:
    """Log-probs of all completions under a random model, and the gradients of a policy-gradient loss on them.

    packed: rows of at most `row_tokens` tokens; otherwise `micro` padded samples at a time through stock transformers.
    The model is the same for equal name and dtype, and gone afterwards.
    """
    model = build_model(name, str(device()), dtype=dtype).train()
    config = load_config(
        None,
        [
            f"worker.actor.padding_free={str(packed).lower()}",
            f"worker.actor.max_token_len_per_gpu={row_tokens}",
            f"worker.actor.micro_batch_size_per_device_for_update={micro}",
        ],
    )
    if packed:
        enable_packing(model)
    if compiled:
        compile_layers(model, **({} if torch.accelerator.is_available() else {"backend": "eager"}))
    padding = Padding(
        pad_id=model.config.text_config.pad_token_id, image_id=model.config.image_token_id, device=device()
    )
    banned_ids = banned_token_ids(build_processor(), model.config)
    scorer = make_scorer(config, model, banned_ids=banned_ids, padding=padding, sharded=False)
    return _backward(model, scorer, batch)


def _backward(model: nn.Module, scorer: Scorer, batch: RolloutBatch) -> Scored:
    where = device()
    advantages = torch.randn(len(batch.mask), generator=torch.Generator().manual_seed(3)).to(where)
    log_probs, tokens = torch.zeros(batch.mask.shape, device=where), float(batch.mask.sum())
    rows = scorer.rows(batch, range(len(batch.groups)))
    for row in rows:
        scores = scorer.score(model, row)
        log_probs[scores.samples, : scores.mask.shape[1]] = scores.log_probs.detach()
        (-(advantages[scores.samples, None] * scores.log_probs * scores.mask).sum() / tokens).backward()
    gradients = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
    return Scored(log_probs, batch.mask.to(where), gradients, len(rows))


def layer_group(name: str) -> str:
    """The kind of layer that a parameter belongs to."""
    tower = "vision" if ".visual." in name else "text"
    for part, label in (
        ("patch_embed", "patches"),
        ("merger", "merger"),
        ("attn", "attention"),
        ("mlp", "mlp"),
        ("norm", "norms"),
        ("embed_tokens", "embeddings"),
        ("lm_head", "embeddings"),
    ):
        if part in name:
            return f"{tower} {label}"
    raise AssertionError(f"no layer group for {name}")


def cosines(left: dict[str, Tensor], right: dict[str, Tensor]) -> dict[str, float]:
    """Cosine of the two gradients within each layer group."""
    assert left.keys() == right.keys()
    sums: dict[str, Tensor] = {}
    for name in left:
        a, b = left[name].float().flatten(), right[name].float().flatten()
        products = torch.stack([a @ b, a @ a, b @ b]).double()
        group = layer_group(name)
        sums[group] = sums[group] + products if group in sums else products
    return {group: float(value[0] / (value[1] * value[2]).sqrt()) for group, value in sums.items()}
