"""Programs that try to break the promise of exact clipping. Run: python attack_programs.py [WORD ...]

One line for each program and way: letters, one a batch: E exact, R refused, W wrong (with the error), X another error than ours.
`want` holds one letter a batch (S: E or R). Norms, clipped sums, and p.grad after a refusal (K: something was kept) are looked at.
"""
import sys
import warnings

import torch
import torch.nn.functional as F
from torch import nn

import ghostclip

warnings.simplefilter("ignore"); torch.set_num_threads(1)
PROGRAMS = {}
T = torch.tensor


def program(name, want, how="backward"):
    def keep(f): PROGRAMS[name] = (want, f, how); return f
    return keep


def square(m, x, *a): return m(x, *a).flatten(1).square().sum(1)
def X(B=6, *s): return torch.randn(B, *(s or (5,)))


class Two(nn.Module):
    """Two layers and something between them."""
    def __init__(s, between, out=3, **parameters):
        super().__init__(); s.a, s.b, s.between = nn.Linear(5, 6), nn.Linear(6, out), between
        for k, v in parameters.items(): setattr(s, k, nn.Parameter(v))
    def forward(s, x, *a): return s.b(s.between(s, torch.tanh(s.a(x)), *a))


# ---- (1a) measured, and wrong all the same: one example outweighs -------------------------------------------------------------------------------------
def weighted(m, x, w): return square(m, x) * w
for power in (4, 6, 8, 12):
    @program(f"all read the first example, whose loss counts 1e{power}, B=6", "R" * 6)
    def _(power=power): return Two(lambda s, h: h + h[:1]), [(X(), T([10.0**power, 1, 1, 1, 1, 1]))] * 6, weighted
@program("two examples, the second reads the first, whose loss counts 1e6", "R" * 8)
def _(): return Two(lambda s, h: torch.cat([h[:1], h[1:] + h[:1]])), [(X(2), T([1e6, 1]))] * 8, weighted
@program("cumsum over the batch, losses count 1e6, 1e3, 1, ...", "R" * 6)
def _(): return Two(lambda s, h: h.cumsum(0)), [(X(), T([1e10, 1e8, 1e6, 1e4, 1e2, 1.]))] * 6, weighted
def infinite(m, x, w): return square(m, x) * w
@program("all read the first example, whose loss is inf (forward finite)", "R" * 4, "finite")
def _(): return Two(lambda s, h: h + h[:1]), [(X(), T([float("inf"), 1, 1, 1, 1, 1]))] * 4, infinite
@program("all read the first example, whose loss is NaN (forward finite)", "R" * 4, "finite")
def _(): return Two(lambda s, h: h + h[:1]), [(X(), T([float("nan"), 1, 1, 1, 1, 1]))] * 4, infinite


# ---- (1b) same graph, ownership changes: examples over two dimensions, operations along the examples ---------------------------------------------------
i2, s2 = T([0, 1]), T([1, 0])
@program("groups [2, 3, d] indexed: identity, then swapped", "EEEEE")
def _(): return Two(lambda s, h, i: h.view(2, 3, 6)[i].reshape(6, 6)), [(X(), i) for i in (i2, i2, s2, i2, s2)], square
@program("groups [2, 3, d] by a matrix: identity, then swapped", "EEEEE")
def _(): return Two(lambda s, h, i: torch.einsum("pq,qkd->pkd", i, h.view(2, 3, 6)).reshape(6, 6)), [(X(), torch.eye(2)[i]) for i in (i2, i2, s2, i2, s2)], square
@program("groups [2, 3, d] by a matrix: identity, then a mean of both", "EERRR")
def _(): return Two(lambda s, h, P: torch.einsum("pq,qkd->pkd", P, h.view(2, 3, 6)).reshape(6, 6)), [(X(), P) for P in (torch.eye(2), torch.eye(2), *[torch.full((2, 2), .5)] * 3)], square
def conv(s, h, k): return F.conv1d(h.t()[:, None], k[None, None], padding=1)[:, 0].t()
@program("a convolution along the examples: 010, then 001 (all shifted)", "EESSS")
def _(): return Two(conv), [(X(), T(k)) for k in ([0., 1, 0], [0., 1, 0], [0., 0, 1], [1., 0, 0], [0., 0, 1])], square
@program("a convolution along the examples: 010, then 011 (mixes)", "EERRR")
def _(): return Two(conv), [(X(), T(k)) for k in ([0., 1, 0], [0., 1, 0], [0., 1, 1], [0., 1, 1], [0., 1, 1])], square
E6 = torch.eye(6); P6 = torch.eye(6)[[3, 1, 5, 0, 2, 4]]
@program("linalg.solve by a matrix: identity, then a permutation", "EEEEE")
def _(): return Two(lambda s, h, P: torch.linalg.solve(P, h)), [(X(), P) for P in (E6, E6, P6, P6, P6)], square
@program("solve_triangular over the batch: identity, then ones", "EERRR")
def _(): return Two(lambda s, h, P: torch.linalg.solve_triangular(P, h, upper=False)), [(X(), P) for P in (E6, E6, *[torch.ones(6, 6).tril()] * 3)], square
def fft(s, h, k): return torch.fft.ifft(torch.fft.fft(h.to(torch.complex64), dim=0) * torch.exp(-2j * torch.pi * k * torch.arange(6) / 6)[:, None], dim=0).real
@program("fft over the batch: shifted by 0, then by 1", "SSSSS")
def _(): return Two(fft), [(X(), T(k)) for k in (0., 0., 1., 2., 1.)], square
@program("cummax over the batch, rows rising, then not", "EERRR")
def _():
    up = torch.arange(6.)[:, None].expand(6, 6)
    return Two(lambda s, h, u: (h + u * 10).cummax(0)[0]), [(X(), u) for u in (up, up, up * 0, up * 0, up * 0)], square
e0, e1 = T([1., 0, 0, 0, 0, 0])[:, None], torch.ones(6, 1)
@program("cumsum over the batch, of which the first row only is let through at first", "EERRR")
def _(): return Two(lambda s, h, w: h + w * h.cumsum(0)), [(X(), w) for w in (e0, e0, e1, e1, e1)], square
@program("a gate of 1e-37, then of one: mean over the batch", "EERRR")
def _(): return Two(lambda s, h, al: h + al * (h - h.mean(0))), [(X(), T(v)) for v in (1e-37, 1e-37, 1., 1., 1.)], square
@program("a view of [6, 6] as [6, 6], then as [3, 12], softmax", "EERRR")
def _(): return Two(lambda s, h, k: h.view(int(k), -1).softmax(1).view(6, 6)), [(X(), T(k)) for k in (6, 6, 3, 3, 3)], square
@program("h[:, 1:] normalized in place over the batch (renorm_), at first inactive", "EERRR")
def renorm():
    def f(s, h, c): h = h.clone(); h[:, 1:].renorm_(2, 1, float(c)); return h
    return Two(f), [(X(), T(v)) for v in (100., 100., .3, .3, .3)], square
@program("amin over a window along the examples", "EERRR")
def _():
    up = torch.arange(6.)[:, None].expand(6, 6)
    return Two(lambda s, h, u: F.max_pool1d(F.pad((h + 10 * u).t(), (1, 0), value=-99.), 2, 1).t()), [(X(), u) for u in (up, up, -up, -up, -up)], square


# ---- (1c) a table that was per example, and is shared now (or the other way round) ---------------------------------------------------------------------
class Positions(nn.Module):
    def __init__(s, B): super().__init__(); s.p, s.e, s.b = nn.Embedding(6, 6), nn.Embedding(9, 6), nn.Linear(6, 3)
    def forward(s, x, p): return s.b(torch.tanh(s.e(x) + s.p(p)))
ids = lambda B=6, n=6: torch.randint(0, 9, (B, n))
@program("position ids [B, T], then [T] where T = B", "EEEEEEE")
def _(): return Positions(6), [(ids(), p) for p in (*[torch.arange(6).expand(6, 6)] * 2, *[torch.arange(6)] * 5)], square
@program("position ids [B, T], then [T] where T = 2 B", "EEEEEEE")
def _(): return Positions(6), [(ids(3), p) for p in (*[torch.arange(6).expand(3, 6)] * 2, *[torch.arange(6)] * 5)], square
class Cond(nn.Module):
    def __init__(s): super().__init__(); s.a, s.c, s.b = nn.Linear(5, 6), nn.Linear(5, 6), nn.Linear(6, 3)
    def forward(s, x, c): return s.b(torch.tanh(s.a(x) + s.c(c)))
@program("conditions [B, 1, d], then [T, d] for all, T = B", "EESSS")
def _():
    c = torch.randn(6, 5); return Cond(), [(X(6, 6, 5), c) for c in (X(6, 1, 5), X(6, 1, 5), c, c, c)], square
class Bare(nn.Module):
    def __init__(s): super().__init__(); s.p, s.e, s.b = nn.Parameter(torch.randn(6, 6)), nn.Embedding(9, 6), nn.Linear(6, 3)
    def forward(s, x, p): return s.b(torch.tanh(s.e(x) + s.p[p]))
@program("a bare table by ids [B, T], then [T] where T = B", "EEEEEEE")
def _(): return Bare(), [(ids(), p) for p in (*[torch.arange(6).expand(6, 6)] * 2, *[torch.arange(6)] * 5)], square
@program("a bare table by ids [T], then [B, T]", "EEEEEEE")
def _(): return Bare(), [(ids(), p) for p in (*[torch.arange(6)] * 2, *[torch.stack([torch.randperm(6) for _ in range(6)])] * 5)], square


class Arange(nn.Module):
    """Positions made inside: [1, T] added up for each example, or [T] for all, by a flag."""
    def __init__(s): super().__init__(); s.p, s.e, s.b = nn.Embedding(6, 6), nn.Embedding(9, 6), nn.Linear(6, 3)
    def forward(s, x, left): p = torch.arange(6); p = (p + left[:, None]).clamp(0, 5) if left.any() else p; return s.b(torch.tanh(s.e(x) + s.p(p)))
z6 = torch.zeros(6, dtype=torch.long)
@program("positions by each text's padding on the left, then nothing is padded, T = B", "EEEEEEE")
def _(): return Arange(), [(ids(), k) for k in (z6 + 1, z6 + 1, z6, z6, z6, z6 + 1, z6)], square
def shifted(s, h, k): k = int(k); return torch.cat([torch.zeros(k, 6), h, torch.zeros(6 - k, 6)])[3:9]
@program("cat with paddings 3 + 3, then 2 + 4, cut to [3:9]: every row goes to its neighbour", "EEEEE")
def _(): return Two(shifted), [(X(), T(k)) for k in (3, 3, 2, 2, 2)], square
class Stem(nn.Module):
    def __init__(s, hook): super().__init__(); s.w, s.b, s.hook = nn.Parameter(torch.randn(5, 6)), nn.Linear(6, 3), hook
    def forward(s, x, v): h = x @ s.w; h.register_hook(lambda g: s.hook(g, float(v))); return s.b(torch.tanh(h))
@program("a hook on a tensor before the first layer, that moves rows from batch 3 on", "EESSS")
def _(): return Stem(lambda g, v: g.roll(int(v), 0)), [(X(), T(v)) for v in (0, 0, 1, 1, 1)], square
@program("a hook on a tensor before the first layer, that clamps, actively from batch 3 on", "EESSS")
def _(): return Stem(lambda g, v: g.clamp(-v, v)), [(X(), T(v)) for v in (1e6, 1e6, .1, .1, .1)], square
def solved(s, h, P): return torch.linalg.solve_triangular(P, h.flatten(1), upper=False).view_as(h)
@program("mixing from batch 3 on, small parameters and long inputs (all materialised, nothing checked)", "EERRR")
def _(): return Two(solved), [(X(6, 90, 5), P) for P in (E6, E6, *[torch.ones(6, 6).tril()] * 3)], lambda m, *b: square(m, *b) * .01
@program("the same, B=64", "EERRR")
def _(): return Two(solved), [(X(64, 90, 5), P) for P in (torch.eye(64), torch.eye(64), *[torch.ones(64, 64).tril()] * 3)], lambda m, *b: square(m, *b) * .01
@program("a bare parameter by which the batch is convolved: no shift, then shifted by one (B=64)", "EESSS")
def _(): return Two(conv), [(X(64), T(k)) for k in ([0., 1, 0], [0., 1, 0], [0., 0, 1], [1., 0, 0], [0., 0, 1])], square
def auto(m, x, w):
    with torch.autocast("cpu", torch.float16): return m(x).float().square().sum(1) * w
@program("float16: rows less their mean over the batch, one example 1e6 times as heavy", "RRRR")
def _(): return Two(lambda s, h: h - .5 * h.roll(1, 0)), [(X(), T([1e6, 1, 1, 1, 1, 1])) for _ in range(4)], auto
@program("float16: mixing by 0.5 percent", "RRRR")
def _(): return Two(lambda s, h: h - .005 * h.roll(1, 0)), [(X(), T([1., 1, 1, 1, 1, 1])) for _ in range(4)], auto
@program("float16: two examples of 32 read each other", "RRRRRRRR")
def _(): return Two(lambda s, h: torch.cat([h[:1] + h[1:2], h[1:]])), [(X(32), torch.ones(32)) for _ in range(8)], auto
@program("two examples of 256 read each other", "R" * 30)
def _(): return Two(lambda s, h: torch.cat([h[:1] + h[1:2], h[1:]])), [(X(256), torch.ones(256)) for _ in range(30)], weighted


# ---- (1d) what is shared depends on the examples, and the reruns don't notice --------------------------------------------------------------------------
class Domain(nn.Module):
    def __init__(s, f): super().__init__(); s.a, s.c, s.b, s.f = nn.Linear(5, 6), nn.Linear(1, 6), nn.Linear(6, 3), f
    def forward(s, x, *a): return s.b(torch.tanh(s.a(x) + s.c(s.f(x, *a))))
def one(v): x = X(); x[:, 0] = v if v is not None else x[:, 0]; return x
@program("a layer reads the mean of a column, alike for all in the first two batches", "EERRR")
def _(): return Domain(lambda x: x[:, :1].mean(0, keepdim=True)), [(one(v),) for v in (1., 1., None, None, None)], square
@program("a layer reads the mean of x; clipper.clip; x time first [T, B, d], T != B", "RR", "clip")
def _():
    class M(nn.Module):
        def __init__(s): super().__init__(); s.a, s.b = nn.Linear(5, 6), nn.Linear(6, 3)
        def forward(s, x, w): h = torch.tanh(s.a(x)); return s.b(h - h.mean(1, keepdim=True))
    return M(), [(X(4, 6, 5), torch.ones(6))] * 2, lambda m, x, w: (m(x, w).square().sum((0, 2)) * w)
@program("ids time first [T, B], T != B: embeddings less their mean over the batch; backward", "RR")
def _():
    class M(nn.Module):
        def __init__(s): super().__init__(); s.a, s.b = nn.Embedding(9, 6), nn.Linear(6, 3)
        def forward(s, x, w): h = s.a(x); return s.b(torch.tanh(h - h.mean(1, keepdim=True)))
    return M(), [(torch.randint(0, 9, (4, 6)), torch.ones(6))] * 2, lambda m, x, w: (m(x, w).square().sum((0, 2)) * w)
@program("packed ids [R], lengths: embeddings less their mean over all rows; backward", "RR")
def _():
    class M(nn.Module):
        def __init__(s): super().__init__(); s.a, s.b = nn.Embedding(9, 6), nn.Linear(6, 3)
        def forward(s, x, o): h = s.a(x); return s.b(torch.tanh(torch.zeros(4, 6).index_add(0, o, h - h.mean(0))))
    return M(), [(torch.randint(0, 9, (11,)), T([0, 0, 0, 1, 1, 2, 2, 2, 2, 3, 3]))] * 2, square
class Packed(nn.Module):
    def __init__(s): super().__init__(); s.a, s.c, s.b = nn.Linear(5, 6), nn.Linear(5, 6), nn.Linear(6, 3)
    def forward(s, x, o, B): h = torch.tanh(s.a(x) + s.c(x.mean(0, keepdim=True))); return s.b(torch.zeros(4, 6).index_add(0, o, h))
@program("nodes [R, d], a layer reads their mean; clipper.clip", "RR", "clip")
def _(): return Packed(), [(X(11), T([0, 0, 0, 1, 1, 2, 2, 2, 2, 3, 3]), torch.ones(4))] * 2, square
@program("all examples alike in the first batch: embeddings less their mean", "RRRR")
def _(): z = torch.ones(6, 5); return Two(lambda s, h: h - h.mean(0)), [(z,), (X(),), (z,), (X(),)], square
class Memory(nn.Module):
    def __init__(s, f): super().__init__(); s.a, s.b, s.q, s.f = nn.Linear(5, 6), nn.Linear(6, 3), nn.Parameter(torch.ones(5)), f; s.register_buffer("m", torch.zeros(5))
    def forward(s, x): s.f(s, x); return s.b(torch.tanh(s.a(x) + (s.q * s.m).sum()))
def ema(s, x): s.m = .9 * s.m + .1 * x.mean(0)
def ema_(s, x): s.m.mul_(.9).add_(.1 * x.mean(0))
for name, f in (("a new buffer", ema), ("a buffer in place", ema_)):
    @program(f"a bare parameter times the mean of the batch, kept in {name}", "RRRR")
    def _(f=f): return Memory(f), [(X(),) for _ in range(4)], square
class Number(nn.Module):
    def __init__(s): super().__init__(); s.a, s.b, s.q = nn.Linear(5, 6), nn.Linear(6, 3), nn.Parameter(torch.ones(6))
    def forward(s, x, v): return s.b(torch.tanh(s.a(x) + s.q * v))
@program("a bare parameter times the batch's mean, given as a number", "RRRR")
def _(): return Number(), [(X(), None) for _ in range(4)], lambda m, x, _: square(m, x, float(x.mean()))
@program("a bare parameter times the batch's count, given as an integer tensor", "RRRR")
def _(): return Number(), [(X(), None) for _ in range(4)], lambda m, x, _: square(m, x, (x > 0).sum())
@program("constant positions [T = B], then the batch's rows in their place", "EERRR")
def _():
    c, y = torch.randn(6, 5), X(6, 6, 5); return Cond(), [(y, c), (y, c), (y, y[:, 0]), (y, y[:, 1]), (y, y[:, 2])], square


class Many(nn.Module):
    def __init__(s): super().__init__(); s.a, s.b = nn.Linear(5, 6), nn.Linear(6, 3)
    def forward(s, x, y): h = torch.tanh(s.a(x)); return s.b(h - h.mean(0))
@program("three crops of each image as rows [3 B, d], less the mean over all rows; clipper.clip", "RR", "clip")
def _(): return Many(), [(X(18), torch.ones(6))] * 2, lambda m, x, y: m(x, y).square().sum(1).view(6, 3).sum(1) * y
class PlusMean(nn.Module):
    def __init__(s): super().__init__(); s.a, s.b, s.q = nn.Linear(5, 6), nn.Linear(6, 3), nn.Parameter(torch.ones(6))
    def forward(s, x, mean): return s.b(torch.tanh(s.a(x)) * (s.q + mean))
@program("examples times (a bare parameter plus the batch's mean)", "RR")
def _(): return PlusMean(), [(X(), None)] * 2, lambda m, x, _: square(m, x, x.mean())
@program("a bare parameter times the batch's mean, of a batch whose halves have one mean (then not)", "SSRRRR")
def _():
    def f(m, x, _): return square(m, x, x[:, 0].mean())
    return Number(), [(one(2.), None), (one(2.), None), *[(X(), None) for _ in range(4)]], f
@program("a layer reads whether any example is large; true in both halves", "SSSS")
def _(): return Domain(lambda x: (x > 0).any().float().view(1, 1)), [(X(),), (X(),), (X().abs(),), (-X().abs(),)], square


# ---- (2) raw errors, sums kept ---------------------------------------------------------------------------------------------------------------------------
@program("sparse gradients of a computed table", "EE")
def _():
    class M(nn.Module):
        def __init__(s): super().__init__(); s.q, s.b = nn.Parameter(torch.randn(9, 6)), nn.Linear(6, 3)
        def forward(s, x): return s.b(F.embedding(x, s.q * 2, sparse=True))
    return M(), [(ids(),)] * 2, square
@program("an operation on a jagged nested tensor between layers", "SS")
def _():
    class M(nn.Module):
        def __init__(s): super().__init__(); s.a, s.b = nn.Linear(5, 6), nn.Linear(6, 3)
        def forward(s, x):
            n = torch.nested.nested_tensor([x[0, :2], x[1, :3], x[2, :4]], layout=torch.jagged)
            return torch.stack([r.sum(0) for r in s.b(torch.tanh(s.a(n))).unbind()])
    return M(), [(X(3, 4, 5),)] * 2, square
@program("torch.func.vmap over the layers", "SS")
def _(): return Two(lambda s, h: torch.func.vmap(lambda r: r * 2 + s.b.bias.sum())(h)), [(X(),)] * 2, square
@program("complex linear maps by a bare parameter", "SS")
def _(): return Two(lambda s, h: (h.to(torch.complex64) @ s.q).abs(), q=torch.randn(6, 6, dtype=torch.complex64)), [(X(),)] * 2, square


# ---- (3) honest models -----------------------------------------------------------------------------------------------------------------------------------
@program("a float16 product between float32 layers, gradients of 1e-3", "EEEE")
def _(): return Two(lambda s, h: (h.half() * 2).float() * 1e-3), [(X(),) for _ in range(4)], square
@program("the same, two examples", "EEEE")
def _(): return Two(lambda s, h: (h.half() * 2).float() * 1e-3), [(X(2),) for _ in range(4)], square
class Half(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x.view_as(x)
    @staticmethod
    def backward(ctx, g): return g.half().float()
@program("a backward that rounds gradients to float16", "EEEE")
def _(): return Two(lambda s, h: Half.apply(h) * 1.0), [(X(),) for _ in range(4)], square
@program("gradients of 1e-15", "EEEEE")
def _(): return Two(lambda s, h: h), [(X(),) for _ in range(5)], lambda m, x: square(m, x) * 1e-15
@program("gradients of 1e-17", "EEEEE")
def _(): return Two(lambda s, h: h), [(X(),) for _ in range(5)], lambda m, x: square(m, x) * 1e-17
@program("losses of 1e-28 to 1e28", "EEEEE")
def _(): return Two(lambda s, h: h), [(X(), T([1e-18, 1e-9, 1., 1e9, 1e16, 1e18])) for _ in range(5)], weighted
@program("positions up to the longest text", "EEE")
def _():
    class M(nn.Module):
        def __init__(s): super().__init__(); s.p, s.e, s.b = nn.Embedding(6, 6), nn.Embedding(9, 6), nn.Linear(6, 3)
        def forward(s, x, n): k = int(n.max()); return s.b(torch.tanh((s.e(x[:, :k]) + s.p(torch.arange(k))) * (torch.arange(k) < n[:, None])[..., None]).sum(1))
    return M(), [(ids(4), T([3, 2, 5, 4]))] * 3, square


@program("position features given as an argument, T = B", "EEE")
def _(): return Cond(), [(X(6, 6, 5), torch.linspace(0, 1, 30).view(6, 5))] * 3, square
@program("position features given as an argument, T = 3, B = 6", "EEE")
def _(): return Cond(), [(X(6, 3, 5), torch.linspace(0, 1, 15).view(3, 5))] * 3, square
@program("a noise level for all, a tensor, given to a layer", "EEE")
def _(): return Domain(lambda x, t: t.view(1, 1)), [(X(), T(.3)) for _ in range(3)], square
@program("a model with a bare parameter called six times for one batch", "EEE")
def _():
    class M(nn.Module):
        def __init__(s): super().__init__(); s.a, s.q = nn.Linear(5, 5), nn.Parameter(torch.ones(5))
        def forward(s, x): return torch.tanh(s.a(x) * torch.exp(s.q * torch.arange(5.)) * .1)
    def loss(m, x):
        for _ in range(6): x = m(x)
        return x.square().sum(1)
    return M(), [(X(),) for _ in range(3)], loss
@program("a submodule called alone, with positions made inside", "EEE")
def _():
    class M(nn.Module):
        def __init__(s): super().__init__(); s.f = Number()
        def forward(s, x): return s.f(x, torch.arange(6.))
    return M(), [(X(),) for _ in range(3)], lambda m, x: square(m.f, x, torch.arange(6.))
@program("positions with random shifts by a generator of the model's own", "EEE")
def _():
    g = torch.Generator().manual_seed(0)
    return Number(), [(X(), None) for _ in range(3)], lambda m, x, _: square(m, x, torch.randn(6, generator=g.manual_seed(int(x.sum().abs() * 1e4))))


def loop(model, losses):
    ps = [p for p in model.parameters() if p.requires_grad]
    rows = [[torch.zeros_like(p) if d is None else d.to_dense() for p, d in zip(ps, torch.autograd.grad(l, ps, retain_graph=True, allow_unused=True))] for l in losses]
    return torch.stack([torch.cat([torch.view_as_real(d).flatten() if d.is_complex() else d.flatten() for d in r]) for r in rows]).double()


def grads(model):
    ps = [p for p in model.parameters() if p.requires_grad]
    return torch.cat([(lambda d: torch.view_as_real(d) if d.is_complex() else d)(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in ps]).double()


def judge(model, loss, batch, clipper, how):
    held = {}
    def loss_fn(m, b): held["losses"] = loss(m, *b); return held["losses"]
    state = torch.get_rng_state(); before = {k: v.clone() for k, v in model.state_dict().items()}
    g = loop(model, loss(model, *batch))
    if how == "finite":  # others' gradients don't depend on the first weight, but 0 * inf is NaN in autograd's loop
        g = loop(model, loss(model, batch[0], torch.ones_like(batch[1]))); g[~batch[1].isfinite()] = float("nan")
    torch.set_rng_state(state); model.load_state_dict(before)
    ok = g.isfinite().all(1); norms = g.norm(dim=1)
    want = (g[ok] * (1.0 / norms[ok]).clamp(max=1)[:, None]).sum(0)
    model.zero_grad()
    try: r = clipper.backward(loss_fn(model, batch)) if how != "clip" else clipper.clip(loss_fn, batch)
    except ghostclip.UnsupportedModelError as e:
        judge.said = str(e); return ("K" if grads(model).any() else "R"), 0.0
    have = grads(model)
    e = max(float((have - want).norm()) / max(float(want.norm()), 1e-30), float(((r.norms.double() - norms)[ok].abs() / norms[ok].clamp(min=1e-30)).max()) if ok.any() else 0.)
    return ("E" if e < 1e-4 else "W"), e


def main(words):
    bad = 0
    for name, (want, make, how) in PROGRAMS.items():
        if words and not any(w in name for w in words): continue
        for second in ("cached", "reweight"):
            torch.manual_seed(0); said, worst, judge.said = "", 0.0, ""
            try:
                model, batches, loss = make()
                clipper = ghostclip.GhostClipper(model, 1.0, second_pass=second)
                for k, b in enumerate(batches):
                    torch.manual_seed(k); letter, e = judge(model, loss, b, clipper, how); said += letter; worst = max(worst, e)
            except ghostclip.UnsupportedModelError as e: said += "R" * (len(want) - len(said)); judge.said = str(e)
            except Exception as e: said += f"X {type(e).__name__}: {str(e)[:90]}"
            fine = len(said) == len(want) and all(s == w or (w == "S" and s in "ER") for s, w in zip(said, want)); bad += not fine
            print(f"{'  ' if fine else '! '}{name:84s} {second:9s} {said:9s} want {want:9s} {'' if fine else f'{worst:.1e} ' + judge.said[:150]}", flush=True)
    print(f"{bad} not as wanted"); return bool(bad)


if __name__ == "__main__": sys.exit(main(sys.argv[1:]))
