"""After the release: optimizers and filters that use the private gradient only, at no cost in privacy."""

from ghostclip.optim.adam_bc import AdamBC
from ghostclip.optim.low_pass import LowPassFilter

__all__ = ["AdamBC", "LowPassFilter"]
