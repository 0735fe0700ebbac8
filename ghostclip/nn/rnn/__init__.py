"""Recurrent layers and cells: torch's kernels forwards, gate gradients backwards (Lee & Kifer 2020, 5.3 and 5.4)."""

from .cells import GRUCell, LSTMCell, RNNCell
from .layers import GRU, LSTM, RNN

__all__ = ["GRU", "LSTM", "RNN", "GRUCell", "LSTMCell", "RNNCell"]
