"""The mechanisms of published networks, each in a few lines, built of torch.nn as their authors' code is."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["MODELS"]

WIDTH, HEADS, TOKENS = 8, 2, 11


class Conv1D(nn.Module):
    """GPT-2's linear layer: its weight is [inputs, outputs]."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.outputs = outputs
        self.weight, self.bias = nn.Parameter(0.3 * torch.randn(inputs, outputs)), nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight)
        return rows.view(*x.shape[:-1], self.outputs)


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
    """Attention of [B, heads, T, d], with a bias that may be the same for all examples; [B, T, heads * d]."""
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    return ((scores if bias is None else scores + bias).softmax(-1) @ v).transpose(1, 2).flatten(2)


def by_head(x: Tensor, heads: int = HEADS) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


class GPT(nn.Module):
    """Position ids of shape [1, T], Conv1D, a head that is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(TOKENS, WIDTH), nn.Embedding(9, WIDTH)
        self.norm, self.attention = nn.LayerNorm(WIDTH), Conv1D(3 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1])[None])
        q, k, v = map(by_head, self.attention(self.norm(h)).chunk(3, -1))
        return self.head(h + attend(q, k, v))


class Swin(nn.Module):
    """Windows folded into the batch, shifted by a roll, with a table of relative positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Conv2d(3, WIDTH, 1), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.table = nn.Parameter(torch.randn(9, HEADS))
        place = torch.stack(torch.meshgrid(torch.arange(2), torch.arange(2), indexing="ij")).flatten(1)
        apart = (place[:, :, None] - place[:, None] + 1).permute(1, 2, 0)
        self.register_buffer("index", apart[..., 0] * 3 + apart[..., 1])

    def forward(self, images: Tensor) -> Tensor:
        h = torch.roll(self.embed(images), (-1, -1), dims=(2, 3)).permute(0, 2, 3, 1)
        b, rows, columns, width = h.shape
        windows = h.view(b, rows // 2, 2, columns // 2, 2, width).transpose(2, 3).reshape(-1, 4, width)
        q, k, v = map(by_head, self.qkv(self.norm(windows)).chunk(3, -1))
        bias = self.table[self.index.flatten()].view(4, 4, HEADS).permute(2, 0, 1)[None]
        return self.out(attend(q, k, v, bias)).view(b, -1, width).mean(1)


class Mamba(nn.Module):
    """A state space: decays and skips are bare Parameters, one of them under an exponential."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.conv = nn.Embedding(TOKENS, WIDTH), nn.Conv1d(WIDTH, WIDTH, 3, padding=2, groups=WIDTH)
        self.decay, self.skip = nn.Parameter(torch.randn(WIDTH, 3)), nn.Parameter(torch.ones(WIDTH))
        self.x_proj, self.head = nn.Linear(WIDTH, WIDTH + 6), nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = F.silu(self.conv(self.embed(tokens).mT)[..., : tokens.shape[1]]).mT
        step, b, c = self.x_proj(x).split([WIDTH, 3, 3], -1)
        step = F.softplus(step)[..., None]
        keep, new = torch.exp(-step * self.decay.exp()), step * b[:, :, None] * x[..., None]
        state, seen = torch.zeros_like(new[:, 0]), []
        for t in range(tokens.shape[1]):
            state = keep[:, t] * state + new[:, t]
            seen.append((state * c[:, t, None]).sum(-1))
        return self.head(torch.stack(seen, 1) + self.skip * x)


class LoRA(nn.Module):
    """A frozen layer and two narrow ones beside it."""

    def __init__(self, base: nn.Module, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.ModuleDict({"default": nn.Linear(inputs, 2, bias=False)})
        self.b = nn.ModuleDict({"default": nn.Linear(2, outputs, bias=False)})

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2.0 * self.b["default"](self.a["default"](x))


def gpt_with_lora() -> nn.Module:
    """GPT, all of it frozen but for what LoRA adds to its attention."""
    model = GPT().requires_grad_(False)
    model.attention = LoRA(model.attention, WIDTH, 3 * WIDTH)
    return model


def tokens(batch: int) -> Tensor:
    """[B, 7]; the ends of some are zero, as padding is."""
    found = torch.randint(1, TOKENS, (batch, 7), generator=torch.Generator().manual_seed(5))
    return found * (torch.arange(7) < 7 - torch.arange(batch)[:, None] % 3)


def images(batch: int) -> Tensor:
    return torch.randn(batch, 3, 4, 4, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "GPT": (GPT, tokens),
    "GPT with LoRA": (gpt_with_lora, tokens),
    "Mamba": (Mamba, tokens),
    "Swin": (Swin, images),
}
