"""Matching layer names against a declaration's patterns, also with very many of them."""

from fnmatch import fnmatchcase
from random import Random

import pytest
import torch

from checkpoints.dialects.test_dialects_read import EXPERT, MLP, QUERY
from checkpoints.folders import declaration
from halfbyte.checkpoints import CheckpointError, read_declaration
from halfbyte.checkpoints.dialects.base import CheckpointDialect, Declaration, LayerGroup, Scheme
from halfbyte.checkpoints.dialects.compressed_tensors import CompressedTensors
from halfbyte.checkpoints.dialects.modelopt import ModelOpt

KINDS: tuple[Scheme, ...] = ("nvfp4", "nvfp4-a16", "fp8")


def test_of_overlapping_targets_the_package_s_choice_wins() -> None:
    match = pytest.importorskip("compressed_tensors.utils.match")
    rng = Random(0)
    targets = [
        "Linear",
        MLP,
        QUERY,
        r"re:.*mlp\..*",
        r"re:.*down_proj",
        "re:.*",
        "re:model.*q_proj",
    ]
    for _ in range(100):
        groups = [
            LayerGroup(kind, tuple(rng.sample(targets, rng.randint(1, 3))))
            for kind in rng.sample(KINDS, 3)
        ]
        found = Declaration(CompressedTensors(), tuple(groups))
        of_target = {target: group.scheme for group in groups for target in group.targets}
        for name in (MLP, EXPERT, QUERY, "lm_head"):
            matched = match.match_targets(name, torch.nn.Linear(1, 1), of_target)
            assert found.scheme_of(name) == (of_target[matched[0]] if matched else None)


def test_modelopt_takes_the_first_pattern_that_covers_a_layer() -> None:
    rng = Random(0)
    patterns = [
        *("*", MLP, QUERY, "model.layers.0", "model.layers.3.mlp", "*_proj", "model.*"),
        *("*.mlp.experts", "*.experts.*", "model.layers.[03].self_attn*", "lm_hea?", "model.layer"),
    ]
    for _ in range(200):
        groups = [
            LayerGroup(kind, tuple(rng.sample(patterns, rng.randint(1, 3))))
            for kind in rng.sample(KINDS, 3)
        ]
        ignore = tuple(rng.sample(patterns[1:], rng.randint(0, 1)))
        found = Declaration(ModelOpt(), tuple(groups), ignore)
        for name in (MLP, EXPERT, QUERY, "lm_head"):

            def covers(pattern: str, name: str = name) -> bool:
                return fnmatchcase(name, pattern) or name.startswith(f"{pattern}.")

            first = next((g.scheme for g in groups if any(map(covers, g.targets))), None)
            assert found.scheme_of(name) == (None if any(map(covers, ignore)) else first)


@pytest.mark.parametrize("rules", [ModelOpt(), CompressedTensors()])
def test_lists_of_every_expert_are_looked_up(
    rules: CheckpointDialect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Comparing 20,000 names with 20,000 layers pairwise would take minutes."""
    compared: list[str] = []

    class Name(str):
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            compared.append(self)
            return str.__eq__(self, other)

    names = [f"model.layers.{i}.mlp.experts.{j}.up_proj" for i in range(40) for j in range(500)]
    targets = tuple(map(Name, names))
    found = Declaration(
        rules, (LayerGroup("nvfp4", targets[::2]), LayerGroup("fp8", targets)), targets[:0]
    )
    monkeypatch.setattr("halfbyte.checkpoints.dialects.modelopt.fnmatchcase", compared.append)
    last = "fp8" if isinstance(rules, CompressedTensors) else "nvfp4"
    assert [found.scheme_of(name) for name in names] == [last, "fp8"] * 10000
    assert len(compared) < 10 * len(names)


def test_a_pattern_that_takes_forever_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halfbyte.checkpoints.dialects.compressed_tensors._SECONDS", 0.2)
    section = declaration("compressed-tensors")
    section["config_groups"]["group_0"]["targets"] = ["re:(a|aa)+[xy]$"]
    found = read_declaration("/x", {"quantization_config": section})
    assert found is not None
    with pytest.raises(CheckpointError, match="expected a pattern that can be matched") as error:
        found.scheme_of("a" * 200 + "z")
    assert "\n" not in str(error.value)
