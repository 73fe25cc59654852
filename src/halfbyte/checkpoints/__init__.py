"""Files to tensors. So far: the KV scales that checkpoints carry."""

from halfbyte.checkpoints.kv_scales import read_kv_scales

__all__ = ["read_kv_scales"]
