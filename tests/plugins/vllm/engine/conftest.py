"""Tests with a real vLLM, in the virtual environment that `make` creates; skipped elsewhere."""

import gc
import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from zlib import crc32

import pytest

# Where vLLM is not installed there is nothing to collect.
collect_ignore_glob = [] if find_spec("vllm") else ["*"]

# Before vLLM is imported: one process, little memory, one thread beside other test workers.
os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
    HF_HUB_OFFLINE="1",
)
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Workers that look for a free port at the same time must not find the same, nor should two runs.
_RUN = crc32(os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid())).encode()) % 20
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
os.environ["VLLM_PORT"] = str(10000 + 1000 * _RUN + 50 * _WORKER)


@pytest.fixture(autouse=True)
def _poison_uninitialised_memory() -> None:
    """Disabled here: vLLM's dummy runs read uninitialized memory."""


@pytest.fixture(scope="session", autouse=True)
def _collect_engines_only() -> Iterator[None]:
    """Keep the objects of imported modules out of garbage collections, which took most of an
    engine's time: vLLM and these tests collect ten times per engine."""
    import vllm.v1.engine.llm_engine  # noqa: F401

    gc.collect()
    gc.freeze()
    with pytest.MonkeyPatch.context() as patch:
        # vLLM freezes its engine's objects, too, and then thaws all.
        patch.setattr(gc, "freeze", lambda: None)
        patch.setattr(gc, "unfreeze", lambda: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def _bind_kernels_once() -> Iterator[None]:
    """On a CPU each new engine of vLLM looks for Triton kernels in all attributes of all modules;
    skipped while no module was imported."""
    if find_spec("vllm.triton_utils.dispatcher") is None:
        yield
        return
    from vllm.triton_utils import dispatcher

    bind, bound = dispatcher._rebind_kernels, set[str]()

    def bind_if_new(overrides: object) -> None:
        if not bound.issuperset(sys.modules):
            bind(overrides)
            bound.update(sys.modules)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatcher, "_rebind_kernels", bind_if_new)
        yield


@pytest.fixture(autouse=True)
def _release_engines() -> Iterator[None]:
    """One engine at a time: vLLM's parallel state is global to the process."""
    yield
    gc.collect()


@pytest.fixture
def own_cache_of_a_worker(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Engines that start together overwrite what the others compile (vLLM's issue 24601)."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = tmp_path_factory.getbasetemp()  # a worker's own
        monkeypatch.setenv("VLLM_CACHE_ROOT", str(folder / "vllm"))
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))


@pytest.fixture(params=["0", "1"], ids=["runner V1", "runner V2"])
def model_runner(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", request.param)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The parallel groups of a single process, and halfbyte's plug-in, for layers without an
    engine."""
    from vllm import distributed
    from vllm.config import VllmConfig, set_current_vllm_config

    import halfbyte.plugins.vllm

    halfbyte.plugins.vllm.register()
    file = tmp_path_factory.mktemp("groups") / "init"
    with set_current_vllm_config(VllmConfig()):
        distributed.init_distributed_environment(1, 0, f"file://{file}", 0, "gloo")
        distributed.initialize_model_parallel(1, 1)
    yield
    distributed.cleanup_dist_env_and_memory()
