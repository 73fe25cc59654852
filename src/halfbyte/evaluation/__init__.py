"""Measures the accuracy of KV cache formats, with K and V read back from the cache."""

from halfbyte.evaluation.greedy import GreedyResult, evaluate_greedy
from halfbyte.evaluation.layers import LayerResult, evaluate_layers
from halfbyte.evaluation.perplexity import PerplexityResult, evaluate_perplexity, text_windows
from halfbyte.evaluation.retrieval import RetrievalResult, evaluate_retrieval, make_context

__all__ = [
    "GreedyResult",
    "LayerResult",
    "PerplexityResult",
    "RetrievalResult",
    "evaluate_greedy",
    "evaluate_layers",
    "evaluate_perplexity",
    "evaluate_retrieval",
    "make_context",
    "text_windows",
]
