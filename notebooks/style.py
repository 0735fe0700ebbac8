"""What the notebooks have in common: plots of one size and four colours, one thread, and no log of dp-accounting.

`from style import COLOURS` is enough: importing this module sets all of it.
"""

import logging

import matplotlib.pyplot as plt
import torch

# Okabe and Ito's, told apart by colour-blind readers too.
COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7"]

plt.rcParams.update(
    {"figure.figsize": (7, 2.8), "figure.dpi": 80, "axes.grid": True, "axes.axisbelow": True, "grid.linewidth": 0.4}
)
torch.set_num_threads(1)
logging.getLogger("absl").setLevel(logging.ERROR)  # dp-accounting logs every order its RDP bound leaves out
