"""What a format costs in accuracy, measured through the cache."""

from halfbyte.evaluation.greedy import GreedyResult, evaluate_greedy
from halfbyte.evaluation.perplexity import PerplexityResult, evaluate_perplexity, text_windows
from halfbyte.evaluation.retrieval import RetrievalResult, evaluate_retrieval, make_context

__all__ = [
    "GreedyResult",
    "PerplexityResult",
    "RetrievalResult",
    "evaluate_greedy",
    "evaluate_perplexity",
    "evaluate_retrieval",
    "make_context",
    "text_windows",
]
