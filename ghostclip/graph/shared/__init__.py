"""Parameters used outside of layers: where they meet the examples, and their per-example gradients there.

Such a parameter is *shared*, and so is every tensor made of shared ones alone, as rows of a table of positions. The
first output that has the examples is the *boundary* (search.py). Two examples, x = [2, 5], one parameter p = 3:

    q = p * p                 shared
    h = x * q                 the boundary: one row of each example
    loss = h                  gradient at h: [1, 1], one number of each example
    at q, by example          [2, 5], before autograd sums them to 7 (boundary.py, closed_forms.py, own_backward.py)
    at p, by example          [2 * 2p, 5 * 2p] = [12, 30], by one backward of both (subgraph.py, norms/pullback.py)
"""
