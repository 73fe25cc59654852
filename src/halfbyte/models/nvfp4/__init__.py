"""NVFP4 layers in transformers' models: planning, insertion, and loading from the shards."""
