"""The check of vLLM's sources, with a package that has little of vLLM."""

from pathlib import Path

import pytest

from dev.check_vllm_sources import check
from dev.vllm_sources import Sources

FILES = {
    "__init__.py": "",
    "config/__init__.py": """
from torch import nn
from vllm.config.cache import CacheConfig as CacheConfig
from .model import *

class VllmConfig:
    cache_config: "CacheConfig | None" = None
    model_config: ModelConfig
    quant_config: nn.Module

def get_current_vllm_config(prefix): ...
""",
    "config/cache.py": """
if True:
    class CacheConfig:
        cache_dtype: str = "auto"
""",
    "config/model.py": """
class _Base:
    @property
    def is_moe(self): ...

class ModelConfig(_Base):
    def __init__(self):
        self.model = ""
        self.register_buffer("table", None)
""",
    "v1/__init__.py": "",
    "v1/attention/__init__.py": "",
    "v1/attention/backend.py": """
from abc import ABC
from typing import Generic, TypeVar

T = TypeVar("T")

class AttentionImpl(ABC, Generic[T]):
    def forward(self, layer, more): ...
""",
}


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """The folder of a package named vllm."""
    for name, text in FILES.items():
        file = tmp_path / "vllm" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path / "vllm"


@pytest.mark.parametrize(
    ("name", "is_there"),
    [
        ("vllm.config", True),
        ("vllm.config.cache.CacheConfig", True),
        ("vllm.config.CacheConfig.cache_dtype", True),
        ("vllm.config.VllmConfig.cache_config.cache_dtype", True),
        ("vllm.config.VllmConfig.model_config.is_moe", True),
        ("vllm.config.VllmConfig.quant_config.of_another_package", True),
        ("vllm.config.ModelConfig.model", True),
        ("vllm.config.ModelConfig.table", True),
        ("vllm.config.nn.Module", True),
        ("vllm.confg", False),
        ("vllm.config.LoadConfig", False),
        ("vllm.config.CacheConfig.dtype", False),
        ("vllm.config.VllmConfig.cache_config.dtype", False),
        ("vllm.config.VllmConfig.model_config.is_hybrid", False),
    ],
)
def test_definitions_are_found(package: Path, name: str, is_there: bool) -> None:
    assert (Sources(package).find(name) is not None) == is_there


def test_what_a_vllm_lacks(package: Path) -> None:
    """Names, parameters that the plug-in does not pass, and those that its own methods lack."""
    missing, optional = check(package)
    for line in (
        "vllm.config.get_layers_from_vllm_config is missing",
        "vllm.config.get_current_vllm_config has other parameters: prefix",
        "vllm.v1.attention.backend.AttentionImpl.forward has other parameters: layer, more",
        "vllm.v1.worker.gpu_worker.Worker.compile_or_warm_up_model is missing",
        "vllm.v1.cudagraph_dispatcher.CudagraphDispatcher.dispatch is missing",
        "vllm.model_executor.layers.layernorm.RMSNorm is missing",
    ):
        assert line in missing
    assert "vllm.config.VllmConfig is missing" not in missing
    assert any(
        line.startswith("vllm.v1.attention.backend.AttentionImpl.forward") for line in missing
    )
    assert "vllm.config.CacheConfig.calculate_kv_scales is missing" in optional
