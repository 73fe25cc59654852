"""Attention to the last tokens as the model made them, on GPUs, joined with that to the pages.

A query at p reads keys after p - R from `RecentInputs`, and older ones from the pages. The first is
one small kernel for decoding and prefill alike. The second is any backend, for which every sequence
is R tokens shorter: its queries stand R positions earlier, and a window loses R. Both leave the log
of their softmax denominators, by which they are joined.
"""
