"""Why the slowest models are slow, found by profiling steps by the processor's time; by name."""

__all__ = ["REASONS"]

RAGGED = (
    "Rows of unequal examples: whose each row is, is measured in every batch, by two or three more backwards, and a "
    "step is many small operations on a thousand rows."
)
PICKED = "Which rows an expert picks is measured in every batch, by two or three more backwards."
EXPERTS = (
    f"{PICKED} An expert that gets no token makes another graph, for which nothing is known: the routing of "
    "the small model that is timed changes from step to step."
)
CONVOLVED = "The filters are computed from others (weight standardisation): torch's kernel runs once for each example."
MERGED = (
    "The adapter computes a matrix for each layer, whose gradient is formed for every example and taken back to the "
    "adapter's parameters."
)
MOVED = "It copies into slices, or picks rows by values, so that ownership is measured in every batch."
OWN = "It has functions of its own between the layers, of which only marks show what they do: measured in every batch."
PAIRS = "The losses read a matrix of all pairs: its gradient fits two orders, so that it is measured in every batch."
PROMPT = "No layer that is trained reads the examples, so that nothing shows that the prompt doesn't depend on them."
CHECKPOINTED = "The first and the second pass each compute the forward again, and nothing is kept between them."

REASONS: dict[str, str] = {
    **dict.fromkeys(("GCN", "GAT", "GATv2", "GIN", "GraphSAGE", "GraphConv", "TAG", "Chebyshev"), RAGGED),
    "Gated graph network": RAGGED,
    **dict.fromkeys(("BiT", "NF-ResNet (timm)"), CONVOLVED),
    **dict.fromkeys(("Llama + HRA", "Llama + LoHa", "Llama + OFT"), MERGED),
    **dict.fromkeys(("Mixtral", "Qwen2-MoE", "OLMoE"), EXPERTS),
    **dict.fromkeys(("Funnel", "LED", "Longformer", "ViLT", "LLaVA", "XLNet"), MOVED),
    **dict.fromkeys(("CLIP", "SigLIP"), PAIRS),
    **dict.fromkeys(("Llama + prompt tuning", "Llama + P-tuning prompt"), PROMPT),
    **dict.fromkeys(("BLOOM", "RecurrentGemma"), OWN),
    "Switch": PICKED,
    "GPT-2, checkpointed": CHECKPOINTED,
}
