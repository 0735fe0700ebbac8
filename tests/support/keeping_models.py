"""Layers whose forward keeps something of its examples in frozen codes, however it writes to them."""

import numpy as np
import torch
from torch import nn

__all__ = ["WRITES", "Codes"]

# How codes are kept.
WRITES = {
    "through data": lambda module, codes: module.codes.data.copy_(codes),
    "through numpy": lambda module, codes: np.copyto(module.codes.numpy(), codes.numpy()),
    "exchanged data": lambda module, codes: setattr(module.codes, "data", codes.clone()),
    "exchanged": lambda module, codes: setattr(module, "codes", codes.clone()),
    "in place": lambda module, codes: module.codes.copy_(codes),
    "through setattr": lambda module, codes: object.__setattr__(module, "codes", codes.clone()),
    "as an array": lambda module, codes: setattr(module, "codes", codes.numpy().copy()),
    "within an array": lambda module, codes: np.copyto(module.codes, codes.numpy()),
    "not at all": lambda module, codes: None,
}


class Codes(nn.Module):
    """Adds the mean of codes that follow the rows by exponential averages, as those of VQ-VAE do.

    Args:
        write: how it keeps them, a name of WRITES.
        kind: "buffer", "attribute", "array" or "frozen parameter".
    """

    def __init__(self, write, kind, width):
        super().__init__()
        self.write, codes = WRITES[write], torch.randn(4, width)
        if kind == "buffer":
            self.register_buffer("codes", codes)
        elif kind == "frozen parameter":
            self.codes = nn.Parameter(codes, requires_grad=False)
        else:
            self.codes = codes.numpy() if kind == "array" else codes

    def forward(self, x):
        codes = torch.as_tensor(self.codes)
        out = x + codes.mean(0)
        if self.training:
            with torch.no_grad():
                self.write(self, 0.9 * codes + 0.1 * x.detach().mean(0))
        return out
