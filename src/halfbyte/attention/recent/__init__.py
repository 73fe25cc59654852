"""Attention to the last tokens as the model made them, on GPUs, joined with that to the pages.

A query at p reads keys after p - R from `RecentInputs`, and older ones from the pages. The pages
come first, by any backend, for which every sequence is R tokens shorter: its queries stand R
positions earlier, and a window loses R. Its result and the logs of its softmax denominators are
then joined with the last tokens by one kernel, in place. `decode` reads them by itself and needs
none of this.
"""
