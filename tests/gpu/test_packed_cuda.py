"""The packed form on an accelerator: FlexAttention and the variable-length kernels against what they stand for, and
the whole model against the plain padded form, in float32 and in bfloat16."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.workload import Workload
from grpo_vlm.model.attention import attention_arguments, packed_attention
from grpo_vlm.training.batch import RolloutBatch
from tests.gpu.rigs import Scored, cosines, device, rollouts, score

pytestmark = pytest.mark.gpu

# pictures of two sizes, of which 100 tokens leave ragged windows; answers of one token too
SMALL = [Workload("tiny", 2, 3, 64, 1, 30), Workload("tiny", 2, 4, 100, 5, 70)]


@pytest.fixture(autouse=True)
def exact_float32():
    """No TF32: what is compared is the algorithm."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def largest(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    """Largest difference of two gradients as a share of the largest gradient."""
    assert left.keys() == right.keys()
    whole = max(value.abs().max().item() for value in right.values())
    return max((left[name] - right[name]).abs().max().item() for name in right) / whole


@pytest.mark.parametrize("compiled", [False, True])
def test_float32_equals_the_plain_form(compiled):
    batch = rollouts(SMALL)
    plain = score("tiny", torch.float32, batch, packed=False)
    packed = score("tiny", torch.float32, batch, packed=True, row_tokens=900, compiled=compiled)
    assert 1 < packed.passes < plain.passes
    assert (plain.log_probs - packed.log_probs).abs().max() <= 1e-4
    assert largest(packed.gradients, plain.gradients) <= 1e-4


def test_float32_tells_pictures_apart():
    """The comparison above can fail: with the first prompt's picture in the second, the log-probs differ."""
    batch = rollouts(SMALL[:1])
    first, second = batch.groups
    shown = dataclasses.replace(second.prompt, pixels=first.prompt.pixels, image_keys=first.prompt.image_keys)
    other = dataclasses.replace(batch, groups=(first, dataclasses.replace(second, prompt=shown)))
    scored = [score("tiny", torch.float32, part, packed=True) for part in (batch, other)]
    assert (scored[0].log_probs - scored[1].log_probs).abs().max() > 1e-3


@pytest.fixture(scope="module")
def plain_bfloat16() -> tuple[str, RolloutBatch, Scored]:
    """The whole 3B shape in the plain form."""
    name = "3b" if torch.accelerator.is_available() else "tiny"
    batch = rollouts([Workload(name, 3, 4, 400, 20, 200), Workload(name, 1, 4, 64, 1, 60)])
    return name, batch, score(name, torch.bfloat16, batch, packed=False)


def test_bfloat16_differs_by_its_rounding(plain_bfloat16):
    """Mean log-prob difference, and the gradients' direction in each kind of layer."""
    name, batch, plain = plain_bfloat16
    packed = score(name, torch.bfloat16, batch, packed=True)
    difference = (plain.log_probs - packed.log_probs).abs().sum() / plain.mask.sum()
    found = cosines(packed.gradients, plain.gradients)
    print(f"\nmean log-prob difference {difference:.4f}, gradient cosines {found}")
    assert difference <= 0.04
    assert min(found.values()) >= 0.995, found


# ---------------------------------------------------------------- attention alone


def a_row() -> tuple[Tensor, Tensor]:
    """document and segment [N] of two groups and padding."""
    lengths = [(0, 0, 150), (0, 1, 70), (0, 2, 1), (0, 3, 200), (1, 0, 37), (1, 1, 130), (1, 2, 5), (-1, 0, 47)]
    document = torch.cat([torch.full((n,), group, dtype=torch.int32) for group, _, n in lengths])
    segment = torch.cat([torch.full((n,), part, dtype=torch.int32) for _, part, n in lengths])
    assert len(document) % 128 == 0
    return document, segment


def visible(document: Tensor, segment: Tensor) -> Tensor:
    """bool [N, N]: what a query may see, written down directly."""
    same = document[:, None] == document[None]
    shared = (segment[None] == 0) | (segment[None] == segment[:, None])
    return same & shared & torch.ones(len(document), len(document), dtype=torch.bool).tril()


def attend(dtype: torch.dtype, *, packed: bool, seed: int = 0) -> tuple[Tensor, list[Tensor]]:
    """Output and gradients of q, k, v for the row above, in the packed form or by SDPA with the dense mask. Padding is
    left out."""
    document, segment = a_row()
    generator = torch.Generator().manual_seed(seed)
    shapes = [(1, 16, len(document), 128), (1, 2, len(document), 128), (1, 2, len(document), 128)]
    states = [torch.randn(shape, generator=generator).to(device(), dtype).requires_grad_() for shape in shapes]
    weight = torch.randn(1, len(document), 16, 128, generator=generator).to(device(), dtype)
    real = (document >= 0).to(device())
    if not packed:
        repeated = [states[0], *(part.repeat_interleave(8, 1) for part in states[1:])]
        mask = visible(document, segment).to(device())
        out = F.scaled_dot_product_attention(*repeated, attn_mask=mask, scale=0.1).transpose(1, 2)
    else:
        arguments = {"attention_mask": None} | attention_arguments(document, segment, device())
        out, _ = packed_attention(torch.nn.Module(), *states, scaling=0.1, **arguments)
    out[:, real].mul(weight[:, real]).sum().backward()
    return out[:, real].detach(), [state.grad[:, :, real] for state in states]


def relative(values: Tensor, reference: Tensor) -> float:
    """|values - reference| / |reference| in Frobenius norm."""
    return float((values.double() - reference.double()).norm() / reference.double().norm())


def test_flex_backward_equals_a_dense_mask_in_float32():
    out, gradients = attend(torch.float32, packed=True)
    expected, wanted = attend(torch.float32, packed=False)
    assert relative(out, expected) <= 1e-5
    for found, reference in zip(gradients, wanted, strict=True):
        assert relative(found, reference) <= 1e-5


def test_bfloat16_attention_is_as_near_as_bfloat16_sdpa():
    out, gradients = attend(torch.bfloat16, packed=True)
    rounded = attend(torch.bfloat16, packed=False)
    exact = attend(torch.float64, packed=False)
    pairs = zip((out, *gradients), (rounded[0], *rounded[1]), (exact[0], *exact[1]), strict=True)
    for found, by_sdpa, reference in pairs:
        assert relative(found, reference) <= max(2 * relative(by_sdpa, reference), 5e-3)
