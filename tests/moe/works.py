"""Products of experts of two models, gate_up and down."""

from halfbyte.moe.cuda.plan import Work

QWEN = (Work(1536, 2048, 128, "nvfp4", True), Work(2048, 768, 128, "nvfp4", False))
GPT = (Work(5760, 2880, 32, "mxfp4", True, True), Work(2880, 2880, 32, "mxfp4", False))
