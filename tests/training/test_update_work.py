"""What an update computes and what it leaves out: each picture once per micro-batch, or once per rollout batch where
the tower is frozen; each prompt once per group; nothing of a group that moves nothing, and never at the price of
another loss."""

from dataclasses import dataclass, replace

import pytest
import torch
from transformers import AutoModelForImageTextToText, TrainerCallback

from grpo_vlm.model.packed import base_model
from grpo_vlm.training.session import Session
from tests.training import rigs
from tests.training.hashed import hashed_but_flat
from tests.training.rigs import settings
from tests.training.updates import changed, learner_of

MULTIPLE = 32  # what rows are padded to here; on a CPU they are not

# ---------------------------------------------------------------- whole steps, watched


@dataclass(frozen=True)
class Pass:
    """One forward pass of a row, as the hooks saw it. tokens: through the text layers. patches: of each pass of the
    vision tower within it. samples: numbers in the update."""

    model: str
    gradient: bool
    tokens: int
    patches: tuple[int, ...]
    samples: tuple[int, ...]


class Watch(TrainerCallback):
    """Hooks on the policy and the reference that note every pass over a row, by rollout step; generation is another
    call of the same model and is left out. groups: what the updates of each step were made of."""

    def __init__(self, trainer, between=lambda model: None):
        """between: called with each model before the second step."""
        self.trainer, self.between = trainer, between
        self.steps, self.groups, self.kept = [], [], []
        self.open = None
        self.models = {"policy": trainer.model}
        if trainer.ref_model is not None:
            self.models["reference"] = trainer.ref_model
        for name, model in self.models.items():
            base = base_model(model)
            base.register_forward_pre_hook(self._begin, with_kwargs=True)
            base.register_forward_hook(lambda *call, name=name: self._end(name))
            base.model.visual.register_forward_pre_hook(self._tower)
            base.model.language_model.register_forward_pre_hook(self._text, with_kwargs=True)
        prepare = trainer.learner.prepare
        trainer.learner.prepare = lambda groups: self.groups[-1].append(groups) or prepare(groups)
        trainer.add_callback(self)

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step % self.trainer.updates_per_step:
            return
        if self.steps:
            self.kept.append(len(self.trainer.learner.scorer.features or ()))
            for model in self.models.values():
                self.between(model)
        self.steps.append([])
        self.groups.append([])

    def _begin(self, module, args, kwargs):
        row = kwargs.get("packed")
        self.open = None if row is None else {"samples": tuple(row.row.samples.tolist()), "tokens": 0, "patches": ()}

    def _tower(self, module, args):
        if self.open is not None:
            self.open["patches"] += (len(args[0]),)

    def _text(self, module, args, kwargs):
        if self.open is not None:
            self.open["tokens"] += kwargs["inputs_embeds"].shape[1]

    def _end(self, name):
        if self.open is not None:
            self.steps[-1].append(Pass(name, torch.is_grad_enabled(), **self.open))
        self.open = None


def rows():
    """Updates of two: pictures A; A and B; none; C and A. Every answer to the second row is worth the same."""
    made = rigs.rows(4)
    shared, other = made[0]["images"][0], made[3]["images"]
    made[1] |= {"problem": "<image><image>Question 1?", "images": [shared, made[1]["images"][0]], "answer": "flat"}
    made[3]["images"] = [other[0], shared]
    return made


def watched(root, folder, between=lambda model: None, **changes):
    """Two rollout steps on the same four rows, in order; returns what was seen and the steps' metrics."""
    base = {"trainer.max_steps": 2, "trainer.val_before_train": False, "data.shuffle": False}
    config = settings(root, folder, **base, **changes)
    with Session(config, train_rows=rows(), reward=hashed_but_flat) as parts:
        parts.trainer.learner.scorer.multiple = MULTIPLE
        watch = Watch(parts.trainer, between)
        parts.train()
        return watch, parts.trainer.state.log_history[:2]


def patches(groups):
    """Of the distinct pictures of these groups, told apart by what is in them."""
    distinct = {}
    for group in groups:
        for pixels in group.prompt.pixels:
            distinct[pixels.numpy().tobytes()] = len(pixels)
    return sum(distinct.values())


def tokens(groups):
    """Each prompt once and every answer."""
    return sum(
        len(group.prompt.token_ids) + sum(len(completion.token_ids) for completion in group.completions)
        for group in groups
    )


def enlarge_tower(model):
    with torch.no_grad():
        for parameter in base_model(model).model.visual.parameters():
            parameter.mul_(1.5)


def padded(count):
    return -(-count // MULTIPLE) * MULTIPLE


def wasted(*counts):
    """Share of padding in rows of so many tokens."""
    return 1 - sum(counts) / sum(padded(count) for count in counts)


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_pictures_and_prompts_are_computed_once(tmp_path, tmp_path_factory, frozen):
    """Old, reference and update passes, two updates a step. Between the steps the tower changes: features of the first
    step must not live on."""
    changes = {
        "worker.actor.model.freeze_vision_tower": frozen,
        "worker.actor.global_batch_size": 2,
        "algorithm.disable_kl": False,
        "algorithm.use_kl_loss": True,
    }
    watch, records = watched(tmp_path_factory.getbasetemp(), tmp_path / "run", enlarge_tower, **changes)
    for passes, (first, second), record in zip(watch.steps, watch.groups, records, strict=True):
        a_b, c_a, every = patches(first), patches(second), patches([*first, *second])
        assert every == a_b + c_a - patches(first[:1]) < a_b + c_a
        computed = iter([(a_b,), (every - a_b,)] if frozen else [(a_b,), (c_a,)] * 3)
        expected = [
            Pass(model, gradient, padded(tokens(groups)), next(computed, ()), tuple(range(8)))
            for model, gradient in (("policy", False), ("reference", False), ("policy", True))
            for groups in (first, second)
        ]
        assert [replace(made, samples=tuple(sorted(made.samples))) for made in passes] == expected
        assert record["actor/skipped_groups"] == 0  # of the flat group the KL has a gradient
        assert record["perf/padding_waste"] == pytest.approx(wasted(tokens(first), tokens(second)), abs=1e-6)
        assert record["rollout/logprob_diff/mean"] <= 2e-5  # stale features would score by another tower
    assert watch.kept == [3 if frozen else 0]


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_a_flat_group_is_not_run_and_the_others_are_in_whole(tmp_path, tmp_path_factory, frozen):
    """One update a step without KL: its pass is the only one, in rows of one group each."""
    changes = {
        "worker.actor.model.freeze_vision_tower": frozen,
        "worker.actor.max_token_len_per_gpu": 3 * MULTIPLE,
    }
    watch, records = watched(tmp_path_factory.getbasetemp(), tmp_path / "run", **changes)
    for passes, (groups,), record in zip(watch.steps, watch.groups, records, strict=True):
        assert [len({score["overall"] for score in group.scores}) > 1 for group in groups] == [True, False, True, True]
        of_samples = {tuple(range(4 * number, 4 * number + 4)): groups[number] for number in (0, 2, 3)}
        assert sorted(made.samples for made in passes) == sorted(of_samples)
        seen = set()
        for made in passes:
            group = of_samples[made.samples]
            pictures = {pixels.numpy().tobytes(): len(pixels) for pixels in group.prompt.pixels}
            new = sum(size for key, size in pictures.items() if not frozen or key not in seen)
            seen |= pictures.keys()
            assert made == Pass("policy", True, padded(tokens([group])), (new,) if new else (), made.samples)
        assert record["actor/skipped_groups"] == 1
        assert record["perf/padding_waste"] == pytest.approx(
            wasted(*(tokens([group]) for group in of_samples.values())), abs=1e-6
        )


# ---------------------------------------------------------------- one update, worked out by hand

VALUES = ((0.7, 1.1, -0.8), (0.0, 0.0, 0.0), (-1.2, 0.5, 0.9), (0.4, -2.0, 1.3))  # advantages; the second is flat
UNCOUNTED = 0, 0  # group and answer that the loss leaves out


@pytest.fixture(scope="module")
def weighed(parts):
    """The groups of `parts` with these advantages, one answer not counted."""
    _, groups = parts
    made = []
    for group, values in zip(groups, VALUES, strict=True):
        longest = max(len(completion.token_ids) for completion in group.completions)
        advantages = torch.zeros(3, longest)
        for row, (completion, value) in enumerate(zip(group.completions, values, strict=True)):
            advantages[row, : len(completion.token_ids)] = value
        made.append(replace(group, advantages=advantages, counted=()))
    made[0] = replace(made[0], counted=(False, True, True))
    return made


def moved(update):
    """With old and reference log-probs away from the current ones, so that ratios clip and the KL is not zero."""
    generator, batch = torch.Generator().manual_seed(5), update.batch
    noise = 0.3 * torch.randn(2, *batch.tokens.shape, generator=generator) * batch.tokens
    return update.having(
        old_log_probs=batch.sampler_log_probs + noise[0], ref_log_probs=batch.sampler_log_probs + noise[1]
    )


def padded_scores(config, groups, banned):
    """Log-probs and entropies of each answer, float64: transformers' own model on right-padded samples."""
    path = config.worker.actor.model.model_path
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float64, attn_implementation="sdpa")
    samples = [(group.prompt, completion) for group in groups for completion in group.completions]
    ids = [torch.tensor([*prompt.token_ids, *completion.token_ids]) for prompt, completion in samples]
    inputs = {"input_ids": torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)}
    inputs["attention_mask"] = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in ids], batch_first=True)
    inputs["mm_token_type_ids"] = (inputs["input_ids"] == model.config.image_token_id).int()
    shown = [prompt for prompt, _ in samples if prompt.pixels]
    inputs["pixel_values"] = torch.cat([pixels for prompt in shown for pixels in prompt.pixels]).double()
    inputs["image_grid_thw"] = torch.cat([prompt.image_grid_thw for prompt in shown])
    logits = model(**inputs, use_cache=False).logits / config.worker.rollout.temperature
    log_p = logits.index_fill(-1, torch.tensor(banned), -torch.inf).log_softmax(-1)
    found = []
    for row, (prompt, completion) in enumerate(samples):
        first, targets = len(prompt.token_ids) - 1, torch.tensor(completion.token_ids)
        of_answer = log_p[row, first : first + len(targets)]
        entropy = -(of_answer.exp() * of_answer.clamp(min=-1e30)).sum(-1)
        found.append((of_answer.gather(-1, targets[:, None])[:, 0], entropy))
    return model, found


def by_hand(config, groups, update, banned):
    """The loss of dual-clip PPO over all counted tokens, with KL (k3) and entropy, and its gradients; and the mean
    entropy of the groups that were run."""
    actor, algorithm = config.worker.actor, config.algorithm
    model, scores = padded_scores(config, groups, banned)
    kl_coef = 0.0 if algorithm.disable_kl else algorithm.kl_coef
    values = [value for group in VALUES for value in group]
    per_sample, watched = [], []
    for row, ((log_probs, entropy), advantage) in enumerate(zip(scores, values, strict=True)):
        group, answer = divmod(row, 3)
        if (group, answer) == UNCOUNTED:
            continue
        old, ref = (part[row, : len(log_probs)] for part in (update.batch.old_log_probs, update.batch.ref_log_probs))
        ratio = (log_probs - old).exp()
        clipped = ratio.clamp(1 - actor.clip_ratio_low, 1 + actor.clip_ratio_high)
        loss = torch.maximum(-advantage * ratio, -advantage * clipped)
        if advantage < 0:
            loss = loss.clamp(max=-advantage * actor.clip_ratio_dual)
        apart = ref - log_probs
        per_sample.append(loss + kl_coef * (apart.exp() - apart - 1) - actor.entropy_coeff * entropy)
        if advantage or kl_coef or actor.entropy_coeff:
            watched.append(entropy.detach())
    means = torch.stack([part.mean() for part in per_sample])
    loss = torch.cat(per_sample).mean() if actor.loss_avg_mode == "token" else means.mean()
    loss.backward()
    gradients = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
    return loss.item(), gradients, torch.cat(watched).mean().item()


TERMS = {
    "policy": {"worker.actor.loss_avg_mode": "token"},
    "by_sequence": {"worker.actor.loss_avg_mode": "seq"},
    "kl": {
        "algorithm.disable_kl": False,
        "algorithm.use_kl_loss": True,
        "algorithm.kl_penalty": "low_var_kl",
        "algorithm.kl_coef": 0.5,
    },
    "entropy": {"worker.actor.entropy_coeff": 0.2},
}


@pytest.mark.parametrize("name", TERMS)
def test_the_loss_with_a_flat_group_is_that_of_all_samples_padded(parts, weighed, name):
    """Left out or not, its tokens are in the mean."""
    base = {"worker.actor.loss_avg_mode": "token", "worker.rollout.temperature": 0.8}
    session, skips = parts[0], name in ("policy", "by_sequence")
    config = changed(session.config, **(base | TERMS[name]))
    trainer, learner = session.trainer, learner_of(session, config)
    learner.scorer.multiple = MULTIPLE
    update = moved(learner.prepare(weighed))
    loss, gradients, entropy = by_hand(config, weighed, update, learner.scorer.banned_ids)
    trainer.model.zero_grad()
    assert learner.accumulate(trainer.model_wrapped, update, unmoved=False).item() == pytest.approx(loss, abs=2e-6)
    ours = {name: value.grad for name, value in trainer.model.named_parameters() if value.grad is not None}
    largest = max(value.abs().max() for value in gradients.values())
    assert ours.keys() == gradients.keys() and largest > 0.01
    for key, value in gradients.items():
        assert (ours[key] - value).abs().max() <= 1e-5 * largest, key
    run = [group for number, group in enumerate(weighed) if number != 1 or not skips]
    totals = trainer.meter.totals(trainer.accelerator)
    assert totals["actor/skipped_groups"] == int(skips)
    assert totals["actor/entropy"] == pytest.approx(entropy, rel=1e-5)
    (row,) = update.rows
    assert row.samples.tolist() == [sample for sample in range(12) if sample // 3 != 1 or not skips]
    assert totals["perf/padding_waste"] == pytest.approx(wasted(tokens(run)), abs=1e-6)
    trainer.model.zero_grad()


def test_where_nothing_moves_one_group_is_run_and_adds_nothing(parts, weighed):
    trainer, learner = parts[0].trainer, learner_of(parts[0], parts[0].config)
    flat = [replace(group, advantages=torch.zeros_like(group.advantages)) for group in weighed]
    advantages = flat[3].advantages.index_fill(0, torch.tensor(0), 1.0)  # of an answer that does not count
    flat[3] = replace(flat[3], advantages=advantages, counted=(False, True, True))
    update = learner.prepare(flat)
    trainer.model.zero_grad()
    assert learner.accumulate(trainer.model_wrapped, update, unmoved=True).item() == 0.0
    assert not any(value.grad.any() for value in trainer.model.parameters() if value.grad is not None)
    assert trainer.meter.totals(trainer.accelerator)["actor/skipped_groups"] == 3
    assert [row.samples.tolist() for row in update.rows] == [[0, 1, 2]]
    assert [learner.seconds(group) > 0 for group in weighed] == [True, False, True, True]
    trainer.model.zero_grad()


def test_the_numbers_of_other_ranks_count(parts, weighed):
    """Another rank has three rows, left out two groups, and has 50 tokens in 7 samples, 30 in 4 of them run."""
    trainer, learner = parts[0].trainer, learner_of(parts[0], parts[0].config)
    learner._gather = lambda sizes: [sizes, [3, 2, 50, 7, 30, 4]]
    update = learner.prepare(weighed)
    lengths = [len(completion.token_ids) for group in weighed for completion in group.completions]
    assert (update.whole.tokens, update.whole.sequences) == (50 + sum(lengths[1:]), 7 + 11)
    assert (update.scored.tokens, update.scored.sequences) == (30 + sum(lengths[1:3] + lengths[6:]), 4 + 8)
    assert [len(row.samples) for row in update.rows] == [9, 0, 0]
    totals = trainer.meter.totals(trainer.accelerator)
    assert totals["actor/skipped_groups"] == 1 + 2 and totals["perf/padding_waste"] == 0


def test_padding_waste_of_padded_rows_and_memory_of_packed_ones(parts, weighed):
    trainer = parts[0].trainer
    sizes = [(len(group.prompt.token_ids), len(c.token_ids)) for group in weighed for c in group.completions]
    kept = sizes[:3] + sizes[6:]
    cut = [kept[first : first + 4] for first in range(0, 9, 4)]
    whole = [len(part) * (max(p for p, _ in part) + max(c for _, c in part)) for part in cut]
    learner_of(parts[0], changed(parts[0].config, **{"worker.actor.padding_free": False})).prepare(weighed)
    waste = trainer.meter.totals(trainer.accelerator)["perf/padding_waste"]
    assert 0.02 < waste == pytest.approx(1 - sum(map(sum, kept)) / sum(whole), abs=1e-6)
    alone, budget = [], max(tokens([group]) for group in weighed)
    learner = learner_of(parts[0], changed(parts[0].config, **{"worker.actor.max_token_len_per_gpu": budget}))
    for groups in ([weighed[0]], [weighed[2]], [weighed[3]]):
        alone.append(learner.prepare(groups).work.largest_bytes)
    assert learner.prepare(weighed).work.largest_bytes == max(alone) > min(alone) > 0  # a group a row
    together = learner_of(parts[0], parts[0].config).prepare(weighed).work.largest_bytes
    assert max(alone) < together < sum(alone) * 1.01
    trainer.meter.totals(trainer.accelerator)
