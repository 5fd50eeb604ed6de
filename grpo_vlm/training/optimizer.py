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
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def _update(self, parameter: Tensor, group: dict) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(parameter, dtype=STATE)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=STATE)
            if parameter.dtype == STATE:
                state["compensation"] = torch.zeros_like(parameter)
        state["step"] += 1
        first, second = group["betas"]
        gradient = parameter.grad.to(STATE)
        state["exp_avg"].lerp_(gradient, 1 - first)
        state["exp_avg_sq"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
        size = (state["exp_avg_sq"].float() / (1 - second ** state["step"])).sqrt_().add_(group["eps"])
        step = state["exp_avg"].float().div_(size).mul_(-group["lr"] / (1 - first ** state["step"]))
        step.add_(parameter, alpha=-group["lr"] * group["weight_decay"])
        if "compensation" not in state:
            parameter.add_(step)
            return
        step += state["compensation"]
        before = parameter.float()
        parameter.add_(step)
        state["compensation"].copy_(step - (parameter.float() - before))
