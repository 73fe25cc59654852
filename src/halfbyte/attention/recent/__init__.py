"""Attention to the last tokens, unquantized, on GPUs, merged with attention to the pages.

A query at p reads keys after p - R from `RecentInputs`, and older ones from the pages. The pages
come first, on any backend, which gets every sequence R tokens shorter: query positions and windows
are reduced by R. One kernel then attends to the last tokens and merges its result with that of the
pages by LSE, in place. `decode`, and on SM90 `prefill`, read the last tokens themselves.
"""
