"""The mechanisms of published networks, each in a few lines, built of torch.nn as their authors' code is."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["MODELS"]

WIDTH, HEADS, TOKENS = 8, 2, 11


class RMSNorm(nn.Module):
    """As Llama's code has it."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class OffsetRMSNorm(RMSNorm):
    """As Gemma's code has it: the weight is what is added to one."""

    def forward(self, x: Tensor) -> Tensor:
        return (1 + self.weight) * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class LayerNorm2d(nn.LayerNorm):
    """LayerNorm over the channels of images."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.permute(0, 2, 3, 1)
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps).permute(0, 3, 1, 2)


class ScaledEmbedding(nn.Embedding):
    """An embedding times the square root of its width."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * math.sqrt(self.weight.shape[1])


class LearnedPositions(nn.Embedding):
    """Positions counted from a mask, behind two rows that are never used."""

    def __init__(self, length: int, width: int) -> None:
        super().__init__(length + 2, width)

    def forward(self, mask: Tensor, past: int = 0) -> Tensor:
        return super().forward((torch.cumsum(mask, 1) * mask - 1)[:, past:] + 2)


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
    """[B, T, heads * d] as [B, heads, T, d]."""
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


class ViT(nn.Module):
    """Patches, a class token and position embeddings that are bare Parameters, layer scale."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 2, stride=2)
        self.token, self.positions = nn.Parameter(torch.randn(1, 1, WIDTH)), nn.Parameter(torch.randn(1, 5, WIDTH))
        self.qkv, self.scale, self.head = nn.Linear(WIDTH, 3 * WIDTH), nn.Parameter(torch.randn(WIDTH)), nn.Linear(8, 3)

    def forward(self, images: Tensor) -> Tensor:
        h = self.patches(images).flatten(2).transpose(1, 2)
        h = torch.cat([self.token.expand(len(h), -1, -1), h], dim=1) + self.positions
        q, k, v = map(by_head, self.qkv(h).chunk(3, -1))
        return self.head((h + self.scale * attend(q, k, v))[:, 0])


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


class ConvNeXt(nn.Module):
    """A depthwise convolution, a LayerNorm over channels, layer scale."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 4, 2, stride=2), LayerNorm2d(4)
        self.depthwise, self.scale = nn.Conv2d(4, 4, 3, padding=1, groups=4), nn.Parameter(torch.randn(4, 1, 1))
        self.wide, self.narrow, self.head = nn.Linear(4, 9), nn.Linear(9, 4), nn.Linear(4, 3)

    def forward(self, images: Tensor) -> Tensor:
        h = self.norm(self.stem(images))
        inner = self.narrow(F.gelu(self.wide(self.depthwise(h).permute(0, 2, 3, 1)))).permute(0, 3, 1, 2)
        return self.head((h + self.scale * inner).mean((2, 3)))


class Llama(nn.Module):
    """RMSNorm, rotary positions, two heads that share keys and values, SwiGLU."""

    def __init__(self, norm: Callable[[int], nn.Module] = RMSNorm) -> None:
        super().__init__()
        self.embed, self.norm1, self.norm2 = ScaledEmbedding(TOKENS, WIDTH), norm(WIDTH), norm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, size, bias=False) for size in (8, 4, 4))
        self.gate, self.up, self.down = nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 8)
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embed(tokens)
        angles = torch.arange(tokens.shape[1])[:, None] * torch.tensor([1.0, 0.1]).to(h)
        n = self.norm1(h)
        q, k = (self.turn(by_head(part, heads), angles) for part, heads in ((self.q(n), 2), (self.k(n), 1)))
        h = h + attend(q, k.expand_as(q), by_head(self.v(n), 1).expand_as(q))
        n = self.norm2(h)
        return self.head(h + self.down(F.silu(self.gate(n)) * self.up(n)))

    @staticmethod
    def turn(x: Tensor, angles: Tensor) -> Tensor:
        """Pairs of features turned by the angles of their positions."""
        a, b = x.chunk(2, -1)
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


class T5(nn.Module):
    """A position bias that no example enters, read from an embedding once and used by two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.bias, self.norm = nn.Embedding(TOKENS, WIDTH), nn.Embedding(5, HEADS), RMSNorm(WIDTH)
        self.first, self.second = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        h, steps = self.embed(tokens), torch.arange(tokens.shape[1])
        bias = self.bias((steps[:, None] - steps).clamp(-2, 2) + 2).permute(2, 0, 1)[None]
        for layer in (self.first, self.second):
            h = h + attend(*map(by_head, layer(self.norm(h)).chunk(3, -1)), bias)
        return h.mean(1) @ self.embed.weight.T


class OPT(nn.Module):
    """Positions from a mask, by an Embedding with a forward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(TOKENS, WIDTH, padding_idx=0), LearnedPositions(9, WIDTH)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = (tokens != 0).long()
        h = torch.tanh(self.embed(tokens) + self.positions(mask)) * mask[..., None]
        return self.head(h.mean(1))


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
    """[B, 3, 4, 4]."""
    return torch.randn(batch, 3, 4, 4, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "GPT": (GPT, tokens),
    "GPT with LoRA": (gpt_with_lora, tokens),
    "Llama": (Llama, tokens),
    "Gemma": (lambda: Llama(OffsetRMSNorm), tokens),
    "T5": (T5, tokens),
    "OPT": (OPT, tokens),
    "Mamba": (Mamba, tokens),
    "ViT": (ViT, images),
    "Swin": (Swin, images),
    "ConvNeXt": (ConvNeXt, images),
}
