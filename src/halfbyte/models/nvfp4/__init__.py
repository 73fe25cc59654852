"""NVFP4 layers in transformers' models: planned, put in place, and filled from the shards."""
