"""Names of tensors in files, where they differ from those of transformers' modules.

Mixtral's files name the experts' projections as its first implementation did: `w1` is gate, `w3` is
up, `w2` is down. Everything here works with the modules' names; a checkpoint that is written gets
its source's (`CheckpointIndex.stored_module`)."""

import re

from halfbyte.checkpoints.index import CheckpointIndex

_RENAMED: dict[str, tuple[tuple[re.Pattern[str], str], ...]] = {
    "mixtral": (
        (re.compile(r"\.block_sparse_moe\."), ".mlp."),
        (re.compile(r"(\.experts\.\d+)\.w1\."), r"\1.gate_proj."),
        (re.compile(r"(\.experts\.\d+)\.w2\."), r"\1.down_proj."),
        (re.compile(r"(\.experts\.\d+)\.w3\."), r"\1.up_proj."),
    )
}
"""By `model_type`: patterns in names of files, and what replaces them."""


def named_as_modules(index: CheckpointIndex, model_type: object) -> CheckpointIndex:
    """The index of a checkpoint with the names of the model's modules.

    Args:
        index: of the files.
        model_type: of the config.
    """
    patterns = _RENAMED.get(str(model_type), ())
    renamed = {}
    for name in index.tensors:
        new = name
        for pattern, replacement in patterns:
            new = pattern.sub(replacement, new)
        if new != name:
            renamed[name] = new
    return index.renamed(renamed) if renamed else index
