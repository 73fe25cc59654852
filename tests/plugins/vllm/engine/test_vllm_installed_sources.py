"""The installed vLLM has everything that the plug-in hooks into."""

from importlib.util import find_spec
from pathlib import Path

from dev.check_vllm_sources import check


def test_hooks_are_in_the_sources() -> None:
    """As the check finds them, which takes a vLLM that cannot be run, too."""
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    assert check(Path(spec.origin).parent).missing == []
