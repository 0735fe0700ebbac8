"""A drop-in for ``torch.nn``: layers with parameters are wrappers that can be clipped, the rest is torch's own.

`Centre` alone is not in torch.nn.
"""

import torch.nn as _torch_nn
from torch.nn import *

from .base import GhostLayer, LayerCall
from .bilinear import Bilinear
from .centre import Centre
from .conv import Conv1d, Conv2d, Conv3d, ConvTranspose1d, ConvTranspose2d, ConvTranspose3d
from .embedding import Embedding
from .embedding_bag import EmbeddingBag
from .linear import Linear
from .multihead import MultiheadAttention
from .normalization import (
    BatchNorm1d,
    BatchNorm2d,
    BatchNorm3d,
    GroupNorm,
    InstanceNorm1d,
    InstanceNorm2d,
    InstanceNorm3d,
    LayerNorm,
    RMSNorm,
    SyncBatchNorm,
)
from .prelu import PReLU
from .rnn import GRU, LSTM, RNN, GRUCell, LSTMCell, RNNCell
from .transformer import (
    Transformer,
    TransformerDecoder,
    TransformerDecoderLayer,
    TransformerEncoder,
    TransformerEncoderLayer,
)


def __getattr__(name: str) -> object:
    """Submodules and late names of torch.nn (functional, init, utils, parallel, ...)."""
    return getattr(_torch_nn, name)
