"""What a format costs in accuracy, measured through the cache."""

from halfbyte.evaluation.perplexity import PerplexityResult, evaluate_perplexity, text_windows

__all__ = ["PerplexityResult", "evaluate_perplexity", "text_windows"]
