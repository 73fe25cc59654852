"""Queries for pages whose K a recipe changed, on GPUs: one launch before a kernel reads the pages.

    scores    q . K = hadamard(q) . K' + q . mean(segment)

K' is what the pages hold (`kvcache/transform.py`). `transform_queries` gives the rotated queries,
`q . mean` of every segment, and the score of a first token that is a constant of the model. The
kernels that read pages add `q . mean` to their scores, and their softmax starts from the first
token's score.
"""

from halfbyte.attention.queries.positions import QueryPositions

__all__ = ["QueryPositions"]
