"""CUDA C++ for few tokens per expert: the weights as loaded stream once through the registers."""
