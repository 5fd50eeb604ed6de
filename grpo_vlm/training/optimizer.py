"""AdamW whose states take two bytes a number, for weights in bf16 (EasyR1's adamw_bf16)."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer

STATE = torch.bfloat16


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
        gradient = parameter.grad.float()
        state["exp_avg"].lerp_(gradient.to(STATE), 1 - first)
        squares = state["exp_avg_sq"].float().mul_(second).addcmul_(gradient, gradient, value=1 - second)
        generator = torch.Generator(parameter.device).manual_seed(state["step"] * 1_000_003 + number)
        state["exp_avg_sq"].copy_(rounded_at_random(squares, generator))
        size = squares.div_(1 - second ** state["step"]).sqrt_().add_(group["eps"])
        step = state["exp_avg"].float().div_(size).mul_(-group["lr"] / (1 - first ** state["step"]))
        step.add_(parameter, alpha=-group["lr"] * group["weight_decay"])
        if "compensation" not in state:
            parameter.add_(step)
            return
        step += state["compensation"]
        before = parameter.float()
        parameter.add_(step)
        state["compensation"].copy_(step - (parameter.float() - before))


def rounded_at_random(values: Tensor, generator: torch.Generator) -> Tensor:
    """float32 values at one of their two neighbours in bf16 (kept as float32), the nearer one more often: right in the
    mean. The last 16 of the 32 bits are what bf16 does not have."""
    bits = values.view(torch.int32)
    noise = torch.randint(0, 1 << 16, values.shape, generator=generator, device=values.device, dtype=torch.int32)
    return ((bits + noise) & -(1 << 16)).view(torch.float32)
