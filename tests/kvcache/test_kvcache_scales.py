"""`KVScales`: conversion to amax, files and models and back is bit-exact."""

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from halfbyte.kvcache import KVScales, get_kv_cache_quant_method
from halfbyte.kvcache.scales import NO_SCALE
from kvcache.page_arithmetic import WITH_GLOBAL_SCALE

each_scaled = pytest.mark.parametrize("dtype", WITH_GLOBAL_SCALE)
positive_float32 = st.floats(width=32, min_value=0, exclude_min=True, allow_infinity=False)
positive_float64 = st.floats(0, 1e300, exclude_min=True)
FILE = "kv_scales.json"


@each_scaled
@settings(max_examples=200, deadline=None, derandomize=True)
@given(multiplier=positive_float32)
def test_conversion_to_amax_and_back_is_exact(dtype: str, multiplier: float) -> None:
    method = get_kv_cache_quant_method(dtype)
    scales = KVScales.from_global_scales([multiplier], [1.0], method)
    k_amax, v_amax = scales.amax_of_layer(0)
    assert method.global_scale_from_amax(k_amax) == multiplier
    assert method.global_scale_from_amax(v_amax) == 1.0


@settings(max_examples=50, deadline=None, derandomize=True)
@given(k_scale=positive_float32, v_scale=positive_float32)
def test_k_and_v_may_have_different_methods(k_scale: float, v_scale: float) -> None:
    k_method, v_method = get_kv_cache_quant_method("fp8"), get_kv_cache_quant_method("nvfp4")
    scales = KVScales.from_global_scales([k_scale], [v_scale], k_method, v_method)
    k_amax, v_amax = scales.amax_of_layer(0)
    assert k_method.global_scale_from_amax(k_amax) == k_scale
    assert v_method.global_scale_from_amax(v_amax) == v_scale


@pytest.mark.parametrize(
    ("dtype", "reach"), [("nvfp4", 2688), ("nvfp4_4over6", 1536), ("fp8", 448), ("fp8_e5m2", 57344)]
)
def test_amax_of_a_scale_is_what_the_format_can_reach(dtype: str, reach: int) -> None:
    scales = KVScales.from_global_scales([0.5], [0.25], get_kv_cache_quant_method(dtype))
    assert scales.amax_of_layer(0) == (reach / 2, reach / 4)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.tuples(positive_float64, positive_float64), max_size=4))
def test_save_and_load_keep_every_bit(
    tmp_path_factory: pytest.TempPathFactory, amax: list[tuple[float, float]]
) -> None:
    folder = tmp_path_factory.mktemp("model")
    scales = KVScales(tuple(k for k, _ in amax), tuple(v for _, v in amax), "kalibriert für √2")
    path = scales.save(folder)
    assert path == folder / FILE
    loaded = KVScales.load(folder)
    assert loaded is not None
    assert (loaded.k_amax, loaded.v_amax) == (scales.k_amax, scales.v_amax)
    assert scales.source in loaded.source


def test_load_of_a_folder_without_scales_is_none(tmp_path: Path) -> None:
    assert KVScales.load(tmp_path) is None


def file_text(**changes: object) -> str:
    fields = {
        "format": "halfbyte-kv-scales-1",
        "source": "user",
        "k_amax": [1.0, 2.0],
        "v_amax": [3.0, 4.0],
    }
    return json.dumps({k: v for k, v in {**fields, **changes}.items() if v != "absent"})


def test_load_reads_the_documented_file(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(file_text())
    loaded = KVScales.load(str(tmp_path))
    assert loaded is not None
    assert (loaded.k_amax, loaded.v_amax) == ((1.0, 2.0), (3.0, 4.0))


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("", id="empty"),
        pytest.param("{", id="cut_off"),
        pytest.param("[]", id="list"),
        pytest.param("null", id="null"),
        pytest.param("3", id="number"),
        pytest.param('"k_amax"', id="string"),
        pytest.param(file_text(format="other"), id="other_format"),
        pytest.param(file_text(format="absent"), id="no_format"),
        pytest.param(file_text(source="absent"), id="no_source"),
        pytest.param(file_text(v_amax="absent"), id="no_v"),
        pytest.param(file_text(k_amax=[1.0]), id="lengths_differ"),
        pytest.param(file_text(k_amax=[1.0, -2.0]), id="negative"),
        pytest.param(file_text(k_amax=[1.0, 0.0]), id="zero"),
        pytest.param(file_text(k_amax=[1.0, math.nan]), id="nan"),
        pytest.param(file_text(v_amax=[math.inf, 1.0]), id="inf"),
        pytest.param(file_text(k_amax=[1.0, None]), id="none_in_list"),
        pytest.param(file_text(k_amax=[1.0, "x"]), id="word_in_list"),
        pytest.param(file_text(k_amax=1.0), id="no_list"),
        pytest.param(file_text(k_amax="12"), id="digits_instead_of_a_list"),
        pytest.param(file_text(k_amax=[1.0, 10**400]), id="integer_beyond_floats"),
    ],
)
def test_load_of_a_broken_file_names_it(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    with pytest.raises(ValueError, match=FILE):
        KVScales.load(tmp_path)


def test_load_of_bytes_that_are_no_text_names_the_file(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(ValueError, match=FILE):
        KVScales.load(tmp_path)


def test_a_stored_zero_is_refused_by_file_and_layer(tmp_path: Path) -> None:
    """It would become a scale of 1."""
    (tmp_path / FILE).write_text(file_text(v_amax=[3.0, 0]))
    with pytest.raises(ValueError, match=rf"{tmp_path}/{FILE}: .*v_amax of layer 1 is 0\.0"):
        KVScales.load(tmp_path)


def test_files_by_their_path(tmp_path: Path) -> None:
    scales = KVScales((1.0,), (0.1,), "user")
    path = scales.save_file(tmp_path / "other.json")
    assert KVScales.load_file(str(path)) == scales
    assert KVScales.load(tmp_path) is None
    with pytest.raises(ValueError, match=r"absent\.json: cannot be read: No such file"):
        KVScales.load_file(tmp_path / "absent.json")


def test_scales_that_a_layer_lacks_are_not_saved(tmp_path: Path) -> None:
    for k_amax, v_amax in (((1.0, NO_SCALE), (1.0, 2.0)), ((1.0, 2.0), (1.0, NO_SCALE))):
        with pytest.raises(ValueError, match="layer 1 has none"):
            KVScales(k_amax, v_amax, "test").save(tmp_path)
        assert list(tmp_path.iterdir()) == []


def test_save_replaces_what_was_there(tmp_path: Path) -> None:
    """Also a link, whose target is left alone; the file has the usual permissions."""
    KVScales((1.0,), (2.0,), "first").save_file(tmp_path / "target")
    (tmp_path / FILE).symlink_to("target")
    (tmp_path / "plain").touch()
    KVScales((3.0,), (4.0,), "second").save(tmp_path)
    assert KVScales.load_file(tmp_path / "target").source == "first"
    assert KVScales.load_file(tmp_path / FILE).source == "second"
    assert (tmp_path / FILE).stat().st_mode == (tmp_path / "plain").stat().st_mode
    assert {file.name for file in tmp_path.iterdir()} == {"target", "plain", FILE}


def test_a_killed_writer_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    """SIGKILL when half of the content is on the disk."""
    KVScales((1.0,), (2.0,), "before").save(tmp_path)
    program = f"""
import os, signal
from halfbyte.kvcache import KVScales
def killed(descriptor):
    os.ftruncate(descriptor, 20)
    os.kill(os.getpid(), signal.SIGKILL)
os.fsync = killed
KVScales((3.0,), (4.0,), "after").save({str(tmp_path)!r})
"""
    done = subprocess.run([sys.executable, "-c", program], check=False)
    assert done.returncode == -signal.SIGKILL
    loaded = KVScales.load(tmp_path)
    assert loaded is not None
    assert loaded.source == "before"
    assert [file.name for file in tmp_path.glob("*.json")] == [FILE]


@pytest.mark.parametrize("bad", [0.0, -0.0, -1.0, -1e-30, math.nan, math.inf, -math.inf])
def test_amax_must_be_positive_and_finite(bad: float) -> None:
    for k_amax, v_amax in (((bad,), (1.0,)), ((1.0,), (bad,))):
        with pytest.raises(ValueError, match="layer 0"):
            KVScales(k_amax, v_amax, "user")


@pytest.mark.parametrize("bad", [True, "1.0", None, [1.0]])
def test_amax_in_a_file_are_numbers(tmp_path: Path, bad: object) -> None:
    file = KVScales((1.0,), (2.0,), "user").save(tmp_path)
    fields = json.loads(file.read_text())
    for name in ("k_amax", "v_amax"):
        file.write_text(json.dumps({**fields, name: [bad]}))
        with pytest.raises(ValueError, match="not a file of KV scales: expected numbers, found"):
            KVScales.load(tmp_path)


def test_k_and_v_must_have_as_many_layers() -> None:
    with pytest.raises(ValueError, match="2 layers of K, 1 of V"):
        KVScales((1.0, 1.0), (1.0,), "user")
    with pytest.raises(ValueError, match="layers"):
        KVScales.from_global_scales([1.0], [], get_kv_cache_quant_method("nvfp4"))


@each_scaled
@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_scales_must_be_positive_and_finite(dtype: str, bad: float) -> None:
    method = get_kv_cache_quant_method(dtype)
    with pytest.raises(ValueError, match="k_scale of layer 1"):
        KVScales.from_global_scales([1.0, bad], [1.0, 1.0], method)
    with pytest.raises(ValueError, match="v_scale of layer 0"):
        KVScales.from_global_scales([1.0], [bad], method)


@pytest.mark.parametrize("layer", [-1, 2])
def test_amax_of_a_layer_that_has_none(layer: int) -> None:
    with pytest.raises(ValueError, match="layer"):
        KVScales((1.0, 2.0), (3.0, 4.0), "user").amax_of_layer(layer)


class Attention(nn.Module):
    """An attention module whose scales lie where a loader put them."""

    def __init__(self, layer_idx: int, where: str, k_scale: float, v_scale: float) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.k_proj, self.v_proj = nn.Linear(4, 4), nn.Linear(4, 4)
        self.attn = nn.Identity()
        owners = {
            "module": (self, self),
            "attn": (self.attn, self.attn),
            "projections": (self.k_proj, self.v_proj),
        }
        if where in owners:
            k_owner, v_owner = owners[where]
            k_owner.register_buffer("k_scale", torch.tensor(k_scale))
            v_owner.register_parameter(
                "v_scale", nn.Parameter(torch.tensor([v_scale], dtype=torch.float32))
            )


@each_scaled
@pytest.mark.parametrize("where", ["module", "attn", "projections"])
def test_from_model_finds_scales(dtype: str, where: str) -> None:
    method = get_kv_cache_quant_method(dtype)
    expected = [(0.017, 0.0031), (0.25, 0.0625), (1e-4, 3.7)]
    # Out of order: layers are found by index, not by position.
    modules = [Attention(i, where, *expected[i]) for i in (2, 0, 1)]
    scales = KVScales.from_model(nn.ModuleList(modules), method)
    assert scales.num_layers == 3
    for layer, multipliers in enumerate(expected):
        back = [method.global_scale_from_amax(amax) for amax in scales.amax_of_layer(layer)]
        assert back == torch.tensor(multipliers, dtype=torch.float32).tolist()


def test_from_model_takes_plain_floats() -> None:
    module = Attention(0, "nowhere", 1, 1)
    module.k_scale, module.v_scale = 0.5, 0.25  # type: ignore[assignment]
    scales = KVScales.from_model(nn.ModuleList([module]), get_kv_cache_quant_method("nvfp4"))
    assert scales.amax_of_layer(0) == (0.5 * 2688, 0.25 * 2688)


def test_from_model_names_the_module_without_scales() -> None:
    model = nn.ModuleDict({"a": Attention(0, "module", 1, 1), "b": Attention(1, "nowhere", 1, 1)})
    with pytest.raises(ValueError, match="b: no k_scale and v_scale for a nvfp4 cache"):
        KVScales.from_model(model, get_kv_cache_quant_method("nvfp4"))


def test_from_model_refuses_a_model_without_attention() -> None:
    with pytest.raises(ValueError, match="no attention module"):
        KVScales.from_model(nn.Linear(4, 4), get_kv_cache_quant_method("nvfp4"))


def test_from_model_refuses_a_gap_in_the_layers() -> None:
    model = nn.ModuleList([Attention(i, "module", 1, 1) for i in (0, 3)])
    with pytest.raises(ValueError, match=r"\[1, 2\]"):
        KVScales.from_model(model, get_kv_cache_quant_method("nvfp4"))


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan])
def test_from_model_refuses_scales_that_are_not_positive(bad: float) -> None:
    model = nn.ModuleList([Attention(0, "module", 1.0, bad)])
    with pytest.raises(ValueError, match="v_scale of layer 0"):
        KVScales.from_model(model, get_kv_cache_quant_method("fp8"))


@pytest.mark.skipif(sys.platform == "win32", reason="needs pipes and devices with names")
@pytest.mark.parametrize("kind", ["pipe", "folder", "device"])
def test_only_files_are_replaced(tmp_path: Path, kind: str) -> None:
    place = tmp_path / kind
    match kind:
        case "pipe":
            os.mkfifo(place)
        case "folder":
            place.mkdir()
        case "device":
            place.symlink_to("/dev/null")
    before = os.lstat(place)
    with pytest.raises(FileExistsError, match="is no regular file"):
        KVScales((1.0,), (2.0,), "here").save_file(place)
    assert os.lstat(place) == before
    assert list(tmp_path.iterdir()) == [place]
