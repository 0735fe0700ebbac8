"""Why the slowest models are slow, found by profiling steps by the processor's time; by name."""

__all__ = ["REASONS"]

PROVED = (
    "An operation that may reorder examples makes the test that examples stay apart run in every step: several more "
    "backwards, half of the step."
)
INDEXED = (
    "Whose each row is, is tested in every batch, by a backward more and by projections of all gradients; norms are "
    "taken by graphs of as many nodes, in many small operations."
)
STARTED = (
    "Recurrences start from constants so low that exactly zero comes back from them. What no gradient reaches is never "
    "proved, so the test that examples stay apart runs in every step: several more backwards, half of the step."
)
CONVOLVED = "The filters are computed from others (weight standardisation): torch's kernel runs once for each example."
EARLIER = "Measured before `F.group_norm` outside of torch's layers was taken for all examples at once."

REASONS: dict[str, str] = {
    **dict.fromkeys(("CLIP", "SigLIP", "Longformer", "Informer"), PROVED),
    "Funnel": PROVED,
    "RWKV": STARTED,
    "XLNet": "Bare parameters in products of several heads: their own backward, once for each example.",
    **dict.fromkeys(("GCN", "GAT", "GATv2", "GIN", "GraphSAGE", "GraphConv", "TAG", "Chebyshev"), INDEXED),
    "Gated graph network": INDEXED,
    "BiT": CONVOLVED,
    "ResNet (timm)": EARLIER,
    "ResNetV2 (timm)": EARLIER,
}
