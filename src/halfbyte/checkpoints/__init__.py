"""Files of NVFP4 checkpoints in both dialects, and their KV scales."""

from halfbyte.checkpoints.dialects.base import Declaration, Dialect, TensorNames
from halfbyte.checkpoints.dialects.registry import DIALECTS, TENSOR_NAMES, read_declaration
from halfbyte.checkpoints.errors import CheckpointError
from halfbyte.checkpoints.fingerprint import fingerprint
from halfbyte.checkpoints.index import CheckpointIndex, TensorEntry
from halfbyte.checkpoints.stored_kv_scales import read_kv_scales

__all__ = [
    "DIALECTS",
    "TENSOR_NAMES",
    "CheckpointError",
    "CheckpointIndex",
    "Declaration",
    "Dialect",
    "TensorEntry",
    "TensorNames",
    "fingerprint",
    "read_declaration",
    "read_kv_scales",
]
