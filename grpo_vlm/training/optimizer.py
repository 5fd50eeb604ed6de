"""The optimizers that torch does not have (`worker.actor.optim.strategy`): AdamW whose states take two bytes a number,
for weights in bf16 (EasyR1's adamw_bf16), and one byte, by bitsandbytes."""

import importlib.util
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from grpo_vlm.config import Config
from grpo_vlm.errors import ConfigError

STATE = torch.bfloat16


def make_optimizer(config: Config, parameters: Iterable[Tensor]) -> Optimizer | None:
    """The optimizer of a strategy of ours; None where transformers makes torch's AdamW (fused on an accelerator)."""
    optim = config.worker.actor.optim
    settings = {"lr": optim.lr, "betas": tuple(optim.betas), "weight_decay": optim.weight_decay}
    if optim.strategy == "adamw_bf16":
        return AdamWBF16(parameters, **settings)
    if optim.strategy == "adamw_8bit":
        check_8bit()
        from bitsandbytes.optim import AdamW8bit

        return AdamW8bit(parameters, **settings)
    return None


def check_8bit() -> None:
    """ConfigError where bitsandbytes is not there or has no device to run on."""
    key, remedy = "worker.actor.optim.strategy", "or take adamw_bf16, which keeps 6 bytes a weight"
    if not torch.accelerator.is_available():
        raise ConfigError(f"{key}: adamw_8bit needs an accelerator and this run is on a CPU; start it on one {remedy}")
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError(f"{key}: adamw_8bit needs the package bitsandbytes: pip install bitsandbytes, {remedy}")


class AdamWBF16(Optimizer):
    """AdamW (arXiv 1711.05101) with both moments in bf16 and, for bf16 weights, a compensation in bf16 that keeps what
    rounding takes from each step (Kahan, "Further remarks on reducing truncation errors", 1965): a step of 1e-6 of a
    weight is below bf16's resolution of 4e-3 and would be lost without it.

    The second moment changes by a thousandth of itself a step, which bf16 cannot hold either: it is rounded up or down
    at random, in the mean to the right value. The draw depends on the step and the parameter alone, so that replicas
    on several devices stay equal and a resumed run goes on as the unbroken one.

    Six bytes of states a weight (four for float32 weights) instead of eight.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        """One update of all parameters with a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        parameters = [(parameter, group) for group in self.param_groups for parameter in group["params"]]
        for number, (parameter, settings) in enumerate(parameters):
            if parameter.grad is not None:
                self._update(parameter, settings, number)
        return loss

    def _update(self, parameter: Tensor, group: dict, number: int) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(parameter, dtype=STATE)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=STATE)
            if parameter.dtype == STATE:
                state["compensation"] = torch.zeros_like(parameter)
        state["step"] += 1
        first, second = group["betas"]
        exp_avg, exp_avg_sq = local(state["exp_avg"]), local(state["exp_avg_sq"])
        weight, gradient = local(parameter), local(parameter.grad).float()
        exp_avg.lerp_(gradient.to(STATE), 1 - first)
        squares = exp_avg_sq.float().mul_(second).addcmul_(gradient, gradient, value=1 - second)
        generator = torch.Generator(weight.device).manual_seed(state["step"] * 1_000_003 + number)
        exp_avg_sq.copy_(rounded_at_random(squares, generator))
        size = squares.div_(1 - second ** state["step"]).sqrt_().add_(group["eps"])
        step = exp_avg.float().div_(size).mul_(-group["lr"] / (1 - first ** state["step"]))
        step.add_(weight, alpha=-group["lr"] * group["weight_decay"])
        if "compensation" not in state:
            weight.add_(step)
            return
        compensation = local(state["compensation"])
        step += compensation
        before = weight.float()
        weight.add_(step)
        compensation.copy_(step - (weight.float() - before))


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor that FSDP2 has divided, of another one itself. AdamW goes number by number, so that
    each rank works on its own."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def rounded_at_random(values: Tensor, generator: torch.Generator) -> Tensor:
    """float32 values at one of their two neighbours in bf16 (kept as float32), the nearer one more often: right in the
    mean. The last 16 of the 32 bits are what bf16 does not have."""
    bits = values.view(torch.int32)
    noise = torch.randint(0, 1 << 16, values.shape, generator=generator, device=values.device, dtype=torch.int32)
    return ((bits + noise) & -(1 << 16)).view(torch.float32)
