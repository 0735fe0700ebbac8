"""Why the slowest models are slow, found by profiling steps by the processor's time; by name."""

__all__ = ["REASONS"]

INDEXED = (
    "Whose each row is, is tested in every batch, by a backward more and by projections of all gradients; norms are "
    "taken by graphs of as many nodes, in many small operations."
)
CONVOLVED = "The filters are computed from others (weight standardisation): torch's kernel runs once for each example."
EARLIER = "Measured before `F.group_norm` outside of torch's layers was taken for all examples at once."

REASONS: dict[str, str] = {
    **dict.fromkeys(("GCN", "GAT", "GATv2", "GIN", "GraphSAGE", "GraphConv", "TAG", "Chebyshev"), INDEXED),
    "Gated graph network": INDEXED,
    "BiT": CONVOLVED,
    "ResNet (timm)": EARLIER,
    "ResNetV2 (timm)": EARLIER,
}
