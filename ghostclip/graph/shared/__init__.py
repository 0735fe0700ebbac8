"""Parameters used outside of layers: where they meet the examples, and their per-example gradients there."""
