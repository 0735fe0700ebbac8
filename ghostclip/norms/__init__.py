"""Squared norms and clipped sums, as tensor functions on a few shapes of per-example gradient."""
