"""Operations of torch with arguments, each of which has three entries in the dimensions that examples may lie in."""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

ROW, SQUARE, CUBE, IMAGES = (3,), (3, 3), (3, 3, 3), (3, 3, 3, 3)
CLASSES, ZEROS, OFFSETS = torch.tensor([0, 1, 2]), torch.zeros(3, 3, 3, dtype=torch.long), torch.tensor([3] * 3)
LABELS, STATS = torch.tensor([[0, 1, -1]] * 3), torch.ones(3, dtype=torch.float64)


def along(word: str, *dims: Any) -> Callable[..., Any]:
    """The function of torch of that name, along those dimensions; of several results the first."""
    function = getattr(torch, word, None) or getattr(torch.linalg, word)

    def first(*inputs: Any) -> Any:
        found = function(*inputs, *dims)
        return found[0] if isinstance(found, tuple) else found

    return first


# Of one dimension; of several; of all entries; of matrices.
OF_ONE = (
    "softmax", "log_softmax", "logsumexp", "cumsum", "cumprod", "prod", "sum", "mean", "std", "var", "std_mean", "max",
    "amax", "median", "nanmedian", "mode", "nansum", "cummax", "logcumsumexp", "_safe_softmax",
)  # fmt: skip
OF_SEVERAL = ("logsumexp", "sum", "amax", "var")
OF_ALL = ("prod", "sum", "norm", "max", "amax", "aminmax", "median", "var", "std_mean", "vector_norm")
OF_MATRICES = ("inv", "det", "pinv", "matrix_exp", "lu_factor")
LOSSES = ("mse_loss", "huber_loss", "smooth_l1_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits")
# Name: an operation, and the shapes of its arguments.
OPERATIONS: dict[str, tuple[Any, ...]] = {
    **{f"{word} {dim}": (along(word, dim), CUBE) for word in OF_ONE for dim in (0, 1)},
    **{f"{word} of two": (along(word, (0, 2)), CUBE) for word in OF_SEVERAL},
    **{f"{word} of all": (along(word), SQUARE) for word in OF_ALL},
    **{word: (along(word), CUBE) for word in OF_MATRICES},
    **{f"{word} {how}": (lambda a, b, word=word, how=how: getattr(F, word)(a, b, reduction=how), SQUARE, SQUARE)
       for word in LOSSES for how in ("mean", "sum")},
    "vector_norm 1": (lambda x: torch.linalg.vector_norm(x, dim=1), CUBE),
    "vector_norm of two": (lambda x: torch.linalg.vector_norm(x, dim=(0, 1)), CUBE),
    "mean beside the variance": (lambda x: torch.var_mean(x, 1)[1], CUBE),
    "aminmax": (lambda x: torch.aminmax(x, dim=0)[0], SQUARE),
    "kthvalue": (lambda x: x.kthvalue(2, 1)[0], CUBE),
    "addbmm": (torch.addbmm, (3, 4), (3, 3, 5), (3, 5, 4)),
    "baddbmm": (torch.baddbmm, (3, 3, 4), (3, 3, 5), (3, 5, 4)),
    "addmm": (torch.addmm, SQUARE, SQUARE, SQUARE),
    "addmm to a row": (torch.addmm, ROW, SQUARE, SQUARE),
    "mm": (torch.mm, SQUARE, SQUARE),
    "bmm": (torch.bmm, CUBE, CUBE),
    "mv": (torch.mv, SQUARE, ROW),
    "addmv": (torch.addmv, ROW, SQUARE, ROW),
    "dot": (torch.dot, ROW, ROW),
    "vdot": (torch.vdot, ROW, ROW),
    "addr": (torch.addr, SQUARE, ROW, ROW),
    "outer": (torch.outer, ROW, ROW),
    "conv1d": (lambda x, w, b: F.conv1d(x, w, b, padding=1), CUBE, CUBE, ROW),
    "conv1d in groups": (lambda x, w, b: F.conv1d(x, w, b, padding=1, groups=3), CUBE, (3, 1, 3), ROW),
    "conv_transpose": (lambda x, w, b: F.conv_transpose1d(x, w, b, padding=1), CUBE, CUBE, ROW),
    "conv_transpose in groups": (
        lambda x, w, b: F.conv_transpose1d(x, w, b, padding=1, groups=3), CUBE, (3, 1, 3), ROW),
    "conv2d": (lambda x, w, b: F.conv2d(x, w, b, padding=1), IMAGES, IMAGES, ROW),
    "conv_tbc": (lambda x, w, b: torch.conv_tbc(x, w, b, 1), CUBE, CUBE, ROW),
    "wn of rows": (lambda v, g: torch._weight_norm(v, g, 0), CUBE, (3, 1, 1)),
    "wn of columns": (lambda v, g: torch._weight_norm(v, g, 2), CUBE, (1, 1, 3)),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (3,), w, b), CUBE, ROW, ROW),
    "layer_norm of two": (lambda x, w, b: F.layer_norm(x, (3, 3), w, b), CUBE, SQUARE, SQUARE),
    "rms_norm": (lambda x, w: F.rms_norm(x, (3,), w), CUBE, ROW),
    "group_norm": (lambda x, w, b: F.group_norm(x, 3, w, b), CUBE, ROW, ROW),
    "group_norm, one group": (lambda x, w, b: F.group_norm(x, 1, w, b), CUBE, ROW, ROW),
    "batch_norm in eval mode": (lambda x, w, b: F.batch_norm(x, 0 * STATS, STATS, w, b, False), CUBE, ROW, ROW),
    "batch_norm": (lambda x, w, b: F.batch_norm(x, None, None, w, b, True), CUBE, ROW, ROW),
    "glu": (lambda x: F.glu(x, 1), (3, 6, 3)),
    "cdist": (torch.cdist, CUBE, CUBE),
    "cdist, p=1": (lambda a, b: torch.cdist(a, b, p=1), SQUARE, SQUARE),
    "pdist": (F.pdist, SQUARE),
    "dist": (torch.dist, SQUARE, SQUARE),
    "cat": (lambda a, b: torch.cat([a, b], 1), CUBE, CUBE),
    "fft": (lambda x: torch.fft.fft(x, dim=1), CUBE),
    "rfft": (lambda x: torch.fft.rfft(x, dim=0), CUBE),
    "slogdet": (lambda x: torch.linalg.slogdet(x)[1], CUBE),
    "solve": (torch.linalg.solve, CUBE, CUBE),
    "solve_triangular": (lambda a, b: torch.linalg.solve_triangular(a, b, upper=True), CUBE, CUBE),
    "cholesky_solve": (torch.cholesky_solve, CUBE, CUBE),
    "lstsq": (lambda a, b: torch.linalg.lstsq(a, b)[0], CUBE, CUBE),
    "qr": (lambda x: torch.linalg.qr(x)[1], CUBE),
    "svd": (lambda x: torch.linalg.svd(x)[1], CUBE),
    "householder_product": (torch.linalg.householder_product, CUBE, SQUARE),
    "cross": (lambda a, b: torch.linalg.cross(a, b, dim=1), CUBE, CUBE),
    "trace": (torch.trace, SQUARE),
    "max_pool2d": (lambda x: F.max_pool2d(x, 2, 1), CUBE),
    "max_pool3d": (lambda x: F.max_pool3d(x, 2, 1), IMAGES),
    "avg_pool2d": (lambda x: F.avg_pool2d(x, 2, 1), IMAGES),
    "avg_pool3d": (lambda x: F.avg_pool3d(x, 2, 1), (3, 3, 3, 3, 3)),
    "adaptive_avg_pool2d": (lambda x: F.adaptive_avg_pool2d(x, 2), IMAGES),
    "adaptive_max_pool2d": (lambda x: F.adaptive_max_pool2d(x, 2), IMAGES),
    "interpolate": (lambda x: F.interpolate(x, scale_factor=2), CUBE),
    "interpolate linear": (lambda x: F.interpolate(x, scale_factor=2, mode="linear"), CUBE),
    "interpolate bilinear": (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), IMAGES),
    "interpolate bicubic": (lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"), IMAGES),
    "unfold": (lambda x: F.unfold(x, 2), IMAGES),
    "unfold one image": (lambda x: F.unfold(x, 2), CUBE),
    "fold": (lambda x: F.fold(x, (3, 3), 2), (3, 12, 4)),
    "fold one image": (lambda x: F.fold(x, (3, 3), 2), (12, 4)),
    "affine_grid": (lambda t: F.affine_grid(t, (3, 1, 3, 3)), (3, 2, 3)),
    "ctc_loss": (lambda x: F.ctc_loss(x, 1 + ZEROS[0, :, :2], OFFSETS, OFFSETS // 3, reduction="none"), CUBE),
    "nll": (lambda x: F.nll_loss(x, CLASSES, reduction="none"), SQUARE),
    "nllmean": (lambda x: F.nll_loss(x, CLASSES), SQUARE),
    "nll of pixels": (lambda x: F.nll_loss(x, ZEROS, reduction="none"), IMAGES),
    "nllmean of pixels": (lambda x: F.nll_loss(x, ZEROS), IMAGES),
    "multi_margin_loss": (lambda x: F.multi_margin_loss(x, CLASSES, reduction="none"), SQUARE),
    "multi_margin_loss mean": (lambda x: F.multi_margin_loss(x, CLASSES), SQUARE),
    "multilabel_margin_loss": (lambda x: F.multilabel_margin_loss(x, LABELS, reduction="none"), SQUARE),
    "soft_margin_loss": (lambda x: F.soft_margin_loss(x, torch.ones_like(x)), SQUARE),
    "attention": (F.scaled_dot_product_attention, IMAGES, IMAGES, IMAGES),
    "attention under a mask": (F.scaled_dot_product_attention, IMAGES, IMAGES, IMAGES, IMAGES),
    "lerp": (torch.lerp, SQUARE, SQUARE, SQUARE),
    "prelu": (F.prelu, CUBE, ROW),
    "renorm": (lambda x: torch.renorm(x, 2, 0, 0.5), SQUARE),
}  # fmt: skip
