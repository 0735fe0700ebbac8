"""Why the slowest models are slow, found by profiling steps by the processor's time; by name."""

__all__ = ["REASONS"]

FOLLOWED = (
    "Whose each row is, is followed through the graph in every batch, and a step is many small operations on a "
    "thousand rows."
)
CELL = (
    "The rows of its recurrent cell aren't followed through the graph: whose each row is, is tested by one more "
    "backward in every batch."
)
CONVOLVED = "The filters are computed from others (weight standardisation): torch's kernel runs once for each example."
MERGED = (
    "The adapter computes a matrix for each layer, whose gradient is formed for every example and taken back to the "
    "adapter's parameters."
)
BARE = (
    "Bare parameters in products of several heads: their gradients are formed for every example, and they are looked "
    "for in the graph in every batch, together two fifths of a step."
)
LOOP = (
    "A recurrence over time in single operations: reading a graph of thousands of them, and finding what the examples "
    "share in it, takes a quarter of a step."
)
SEARCHED = (
    "Bare parameters are looked for in the graph in every batch, a fifth of a step, and a step of 8 ms is many small "
    "operations."
)
PICKED = "Which rows an expert picks is followed through the graph in every batch."
CHECKPOINTED = "The first and the second pass each compute the forward again, and nothing is kept between them."

REASONS: dict[str, str] = {
    **dict.fromkeys(("GCN", "GAT", "GATv2", "GIN", "GraphSAGE", "GraphConv", "TAG", "Chebyshev"), FOLLOWED),
    "Gated graph network": CELL,
    **dict.fromkeys(("BiT", "NF-ResNet (timm)"), CONVOLVED),
    **dict.fromkeys(("Llama + HRA", "Llama + LoHa", "Llama + OFT"), MERGED),
    "XLNet": BARE,
    "Funnel": SEARCHED,
    "RecurrentGemma": LOOP,
    "Switch": PICKED,
    "GPT-2, checkpointed": CHECKPOINTED,
}
