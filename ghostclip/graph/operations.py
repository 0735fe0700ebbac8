"""What torch's operations do with rows, by the names that autograd has for them."""

from __future__ import annotations

import re
from typing import Any


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# One number for each of the inputs' numbers that are in the same place, by broadcasting.
POINTWISE = _words("""
    Abs Acos Acosh Add Addcdiv Addcmul Angle Asin Asinh Atan Atan2 Atanh BinaryCrossEntropy BinaryCrossEntropyWithLogits
    Ceil Celu Clamp ClampMax ClampMin Complex Copysign Cos Cosh Deg2Rad Digamma Div Elu EluBackward Erf Erfc Erfinv Exp
    Exp2 Expand Expm1 Floor Fmax Fmin Fmod Frac Gelu GeluBackward Hardshrink Hardsigmoid Hardswish Hardtanh
    HardtanhBackward HuberLoss Hypot I0 LeakyRelu LeakyReluBackward Lerp Lgamma Log Log10 Log1P Log2 LogSigmoid
    LogSigmoidBackward LogSigmoidForward Logaddexp Logaddexp2 Logit MaskedFill Maximum Minimum Mish MseLoss Mul NanToNum
    NativeDropout NativeDropoutBackward Neg Polar Pow PreluKernel Rad2Deg Reciprocal Relu Remainder Round
    RreluWithNoise Rsqrt Rsub Sgn Sigmoid SigmoidBackward Sign Silu Sin Sinc Sinh SmoothL1Loss SoftMarginLoss Softplus
    SoftplusBackward Softshrink SpecialEntr SpecialErfcx Sqrt Sub Tan Tanh TanhBackward Threshold ThresholdBackward
    Trunc Where Xlogy
""")
# The same numbers in another shape or type.
SHAPING = _words("""
    Alias ChannelShuffle Chunk Clone Conj ConjPhysical ConstantPadNd DiagEmbed Diagonal DiagonalBackward
    Lift LiftFresh NegView Permute PixelShuffle PixelUnshuffle ReflectionPad1D ReflectionPad2D ReflectionPad3D Repeat
    ReplicationPad1D ReplicationPad2D ReplicationPad3D ReshapeAlias ReshapeCopy Rot90 Select SelectBackward Slice
    SliceBackward Split SplitWithSizes Squeeze Stack T ToCopy Transpose Tril Triu Unbind Unfold UnsafeSplit
    UnsafeSplitWithSizes UnsafeView Unsqueeze View ViewAsComplex ViewAsReal torch::autograd::CopyBackwards
""")
# Along dimensions, or within rows, that the graph's structure names.
ALONG = _words("""
    AdaptiveAvgPool2D AdaptiveAvgPool3D AdaptiveMaxPool2D AdaptiveMaxPool3D AffineGridGenerator Amax Amin Aminmax
    AvgPool2D AvgPool3D BatchNormNoUpdate Cat Cdist Cholesky Col2Im ConvDepthwise2D ConvDepthwise3D ConvTbc Convolution
    ConvolutionBackward CtcLoss CudnnBatchNorm CudnnConvolution CudnnConvolutionTranspose CudnnCtcLoss Cummax Cummin
    Cumprod Cumsum FftC2C FftC2R FftR2C FractionalMaxPool2D FractionalMaxPool3D FusedRmsNorm Glu Im2Col Kthvalue
    LinalgCholeskyEx LinalgCross LinalgDet LinalgEig LinalgEigh LinalgInvEx LinalgLuFactorEx LinalgMatrixExp LinalgPinv
    LinalgQr LinalgSlogdet LinalgSolveEx LinalgSolveTriangular LinalgSvd LinalgVectorNorm LogSoftmax
    LogSoftmaxBackwardData Logcumsumexp Logsumexp Max MaxPool2D MaxPool2DWithIndices MaxPool3DWithIndices Mean Median
    Min MiopenConvolution Mode MultiMarginLoss MultilabelMarginLoss Nanmedian Nansum NativeBatchNorm NativeGroupNorm
    NativeLayerNorm NativeLayerNormBackward NllLoss NllLoss2D Norm Prod SafeSoftmax SlowConv2D Softmax
    SoftmaxBackwardData Std StdMean Sum ThnnFusedGruCell ThnnFusedLstmCell Trace UpsampleBicubic2D UpsampleBilinear2D
    UpsampleLinear1D UpsampleNearest1D UpsampleNearest2D UpsampleNearest3D UpsampleTrilinear3D Var VarMean
    WeightNormInterface
""")
# Sums over a dimension that both factors have.
PRODUCTS = _words("Addbmm Addmm Addmv Baddbmm Bmm Dot GroupedMm Linear Matmul Mm Mv Vdot")
ATTENTION = re.compile("ScaledDotProduct|FlashAttention|EfficientAttention|CudnnAttention")
# Operations whose entries come from places that indices name.
INDEXED = _words("""
    AsStrided Embedding EmbeddingBag Flip Gather GridSampler2D GridSampler2DCpuFallback GridSampler3D Index IndexAdd
    IndexCopy IndexFill IndexPut IndexReduce IndexSelect MaskedScatter MaskedSelect MaxUnpool2D MaxUnpool3D Put Roll
    Scatter ScatterAdd ScatterReduce SegmentReduce Sort Take Topk UnsafeIndex UnsafeIndexPut
    torch::autograd::CopySlices
""")
# Functions of other libraries whose backwards were read: products with frozen quantized weights.
QUANTIZED = {
    "bitsandbytes.autograd._functions": "MatMul4Bit MatMul8bitFp MatMul8bitLt",
    "hqq.core.quantize": "HQQMatmulCachedDeq HQQMatmulNoCacheDeq HQQMatmulNoCacheMul",
}
ROW_BY_ROW = {f"{module}.{name}" for module, names in QUANTIZED.items() for name in _words(names)}
KNOWN = POINTWISE | SHAPING | ALONG | PRODUCTS | INDEXED | ROW_BY_ROW
# The word in a node's name; a node without one goes by its whole name.
WORD = re.compile(r"(\w+?)Backward\d$")
MASKED_SCATTER, EMBEDDING = "MaskedScatter", "Embedding"
# An operation in place on a part of a tensor; its first input is the whole tensor before. It doesn't say which part.
COPY_INTO_SLICES = "torch::autograd::CopySlices"
# Reads numbers as they lie in memory, which may be another order in the next batch.
AS_STRIDED = "AsStrided"
# Reshapes, which keep the order in which numbers lie.
VIEWS = {"View", "ReshapeAlias", "UnsafeView", "ReshapeCopy"}
# Those of SHAPING that leave numbers in their rows, as reshapes do whose rows fit; the others may put them elsewhere.
STAYING = _words("""
    Alias Clone Conj ConjPhysical NegView Permute Squeeze T ToCopy Transpose Unsqueeze ViewAsComplex ViewAsReal
""")
REARRANGING = SHAPING - VIEWS - STAYING
# Their results may have other dimensions than their first inputs.
OTHER_DIMENSIONS = {EMBEDDING, "Index", "Take"}
# Operations that are given an index, a mask or the like beside their inputs in the graph.
HIDING_CONSTANTS = (INDEXED - {AS_STRIDED, "Flip", "Roll", "Sort", "Topk"}) | {
    "Where", "MaskedFill", "NativeDropout", "NllLoss", "NllLoss2D", "CtcLoss", "CudnnCtcLoss", "BinaryCrossEntropy",
    "BinaryCrossEntropyWithLogits", "RreluWithNoise", "NativeBatchNorm", "BatchNormNoUpdate", "CudnnBatchNorm",
    "FractionalMaxPool2D", "FractionalMaxPool3D", "GroupedMm", "MultiMarginLoss", "MultilabelMarginLoss",
    "SoftMarginLoss",
}  # fmt: skip
EXPANDING = {"Expand", "Repeat"}
# How many of the last dimensions an operation goes along; all others that don't say go along all.
LAST = {"AdaptiveAvgPool2D": 2, "AdaptiveAvgPool3D": 3, "AdaptiveMaxPool2D": 2, "AdaptiveMaxPool3D": 3, "AvgPool2D": 2,
        "AvgPool3D": 3, "Cdist": 1, "Cholesky": 2, "FractionalMaxPool2D": 2, "FractionalMaxPool3D": 3,
        "FusedRmsNorm": 1,
        "LinalgCholeskyEx": 2, "LinalgDet": 2, "LinalgEig": 2, "LinalgEigh": 2, "LinalgInvEx": 2, "LinalgLuFactorEx": 2,
        "LinalgMatrixExp": 2, "LinalgPinv": 2, "LinalgQr": 2, "LinalgSlogdet": 2, "LinalgSvd": 2, "MaxPool2D": 2,
        "MaxPool2DWithIndices": 2, "MaxPool3DWithIndices": 3, "UpsampleBicubic2D": 2, "UpsampleBilinear2D": 2,
        "UpsampleLinear1D": 1, "UpsampleNearest1D": 1, "UpsampleNearest2D": 2, "UpsampleNearest3D": 3,
        "UpsampleTrilinear3D": 3, **dict.fromkeys(ROW_BY_ROW, 1)}  # fmt: skip
# These have the examples in the first dimension and go along all others.
FIRST = {"AffineGridGenerator", "BatchNormNoUpdate", "Col2Im", "ConvDepthwise2D", "ConvDepthwise3D", "Convolution",
         "ConvolutionBackward", "CudnnConvolution", "CudnnConvolutionTranspose", "Im2Col",
         "MiopenConvolution", "MultiMarginLoss", "MultilabelMarginLoss", "NativeGroupNorm",
         "NllLoss", "NllLoss2D", "SlowConv2D", "ThnnFusedGruCell", "ThnnFusedLstmCell"}  # fmt: skip
# Those of them that have the examples in the first dimension of several inputs; all others in that of the first one.
CELLS = {"ThnnFusedGruCell", "ThnnFusedLstmCell"}
# These have channels in the second dimension and, while training, go along all others.
BY_CHANNEL = {"CudnnBatchNorm", "NativeBatchNorm"}
# Operations that move rows or don't, depending on the values of their indices.
BY_VALUE = {"Index", "IndexPut", "UnsafeIndex", "UnsafeIndexPut", "IndexSelect", MASKED_SCATTER, "Embedding", "Gather",
             "Scatter", "ScatterAdd", "ScatterReduce", "IndexAdd", "IndexCopy", "IndexFill", "IndexReduce",
             COPY_INTO_SLICES, AS_STRIDED}  # fmt: skip


def word_of(node: Any) -> str:
    """The operation that a node of torch's own belongs to; of any other Function its full name."""
    if found := WORD.match(node.name()):
        return found[1]
    function = getattr(type(node), "_forward_cls", None)
    return node.name() if function is None else f"{function.__module__}.{function.__qualname__}"


def hides_constants(node: Any) -> bool:
    """Whether an operation may have been given something that isn't among its inputs in the graph, as an index."""
    word = word_of(node)
    return word in HIDING_CONSTANTS or word not in KNOWN
