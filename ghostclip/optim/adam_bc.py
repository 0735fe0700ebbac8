"""Adam for private gradients, its second moments corrected for the noise (Tang et al. 2023, DP-AdamBC)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ghostclip.errors import PrivacyError
from ghostclip.validate import positive

__all__ = ["AdamBC"]

NoiseStd = Callable[[nn.Parameter], float]


class AdamBC(Optimizer):
    """Adam with the noise's variance subtracted from its second moments (Tang et al. 2023, algorithm 1).

    With noise of standard deviation s in each entry of the private gradient g, the average of g^2 is that of the
    clipped gradient plus s^2. Adam divides by its root, so that all entries where noise prevails move alike. Here entry
    i moves by ``lr * m_i / sqrt(max(v_i - s^2, floor))``, for Adam's averages m of g and v of g^2.

    ``optimizer.noise_std = engine.noise_std`` says how much noise there is; without it `step` raises PrivacyError.

    Args:
        params: parameters, or groups of them.
        lr: learning rate.
        betas: decay of both averages.
        floor: the least that is divided by, squared; about the square of gradients that are to count as zero.

    Attributes:
        noise_std: (parameter) -> standard deviation of the noise in an entry of its ``grad``.

    Raises:
        ValueError, TypeError: an argument is out of range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        floor: float = 1e-8,
    ) -> None:
        if not (len(betas) == 2 and all(0 <= beta < 1 for beta in betas)):
            raise ValueError(f"betas must be two numbers in [0, 1); got {betas!r}")
        defaults = {"lr": positive(lr=lr), "betas": tuple(betas), "floor": positive(floor=floor)}
        super().__init__(params, defaults)
        self.noise_std: NoiseStd | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update; returns what ``closure`` returns.

        Raises:
            PrivacyError: ``noise_std`` isn't set.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.noise_std is None:
            raise PrivacyError("AdamBC needs to know the noise; set optimizer.noise_std = engine.noise_std")
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, self.noise_std(parameter), group)
        return loss

    def _update(self, parameter: nn.Parameter, grad: Tensor, std: float, group: dict[str, Any]) -> None:
        state, (decay, square_decay) = self.state[parameter], group["betas"]
        if not state:
            state.update(step=0, exp_avg=torch.zeros_like(parameter), exp_avg_sq=torch.zeros_like(parameter))
        state["step"] += 1
        state["exp_avg"].lerp_(grad, 1 - decay)
        state["exp_avg_sq"].mul_(square_decay).addcmul_(grad, grad, value=1 - square_decay)
        first = state["exp_avg"] / (1 - decay ** state["step"])
        second = state["exp_avg_sq"] / (1 - square_decay ** state["step"])
        second.sub_(std * std).clamp_(min=group["floor"])
        parameter.addcdiv_(first, second.sqrt_(), value=-group["lr"])
