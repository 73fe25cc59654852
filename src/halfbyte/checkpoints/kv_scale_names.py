"""Names of the tensors that hold K and V scales, in the dialects of all writers.

Known, after `model.layers.N.self_attn.`:

| written by | name | value |
|---|---|---|
| ModelOpt | `k_proj.k_scale`, with fused projections `qkv_proj.k_scale` | decode |
| compressed-tensors, vLLM | `k_scale`, `attn.k_scale` | decode |
| vLLM's first FP8 caches | `attn.kv_scale` | decode, of both |
| Quark, older vLLM and compressed-tensors | `k_proj.output_scale` | decode |
| Hunyuan | `k_cache.scale` | decode |
| Mistral | `k_fake_quantizer.qscale_act`, `kv_…` | decode |
| compressed-tensors, for NVFP4 caches | `k_global_scale` | encode, 2688 / amax |

Other names that look like scales of K and V are recognized, so that they are refused and not passed
over: `kv_cache_scaling_factor` (TensorRT-LLM; FP8 or INT8), `k_scale_inv`, `qkv_proj.output_scale`
(of Q, too), `k_bmm_quantizer._amax` (ModelOpt's state, which its export converts) and the like, and
any other tensor of a layer's attention whose words say `scale` (or `amax`) and K or V.
Scales of weights, activations and Q, and all scales of indexers, draft models and towers for images
or audio, are other scales, which are ignored.
"""

import re
from typing import NamedTuple

# Names are matched whole: the files may also have drafts, and vision and audio towers, whose layers
# have scales of their own.
_OF_MODEL = r"(?:(?:model|language_model|text_model|base_model|transformer|decoder|module)\.)*"
_OF_ATTENTION = r"(?:(?:self_attn|self_attention|attention|attn|kv_cache)\.)*"
_LAYER = rf"^{_OF_MODEL}layers\.(?P<layer>\d{{1,6}})\."
_KNOWN = re.compile(
    rf"{_LAYER}{_OF_ATTENTION}(?:"
    r"(?:(?:[kv]|qk(?:qk)?v)_proj\.)?(?P<side>[kv])_(?P<is_global>global_)?scale|"
    r"(?P<projection>[kv])_proj\.output_scale|"
    r"(?P<cache>[kv])_cache\.scale|"
    r"(?P<quantizer>k|v|kv)_fake_quantizer\.qscale_act|"
    r"(?P<both>kv)_scale)$"
)
_OFFSET = re.compile(
    rf"{_LAYER}{_OF_ATTENTION}(?:(?:[kv]_(?:proj|cache)\.)?(?:k|v|kv)_(?:bias|zero_point|offset)|"
    r"[kv]_proj\.output_zero_point|[kv]_cache\.(?:zero_point|offset))$"
)
_OTHER_MODELS = re.compile(
    r"(?:^|[._])(?:mtp|eagle|draft|speculator|medusa|nextn|vision|visual|audio|encoder)"
)
_OTHER_MODULES = re.compile(
    r"(?:^|\.)(?:\w*indexer|\w*compressor|\w*mlp|\w*experts?|\w*moe|ffn|feed_forward|\w*norm)\."
)

_SIDE = "(?:k|v|kv|keys?|values?|key_value)"
_KIND = r"(?:cache|global|static|act|activation|output|tensor|block|head|fp8|fp4|nvfp4|proj|rcp)"
_SCALING = r"(?:(?:de)?scal(?:es?|ing)|qscale|absmax|amax)"
_LEAF = rf"_*{_SIDE}_(?:(?:{_KIND}|(?:de)?quant[a-z]*|orig)_)*{_SCALING}(?:_\w+)?"
_REVERSED = rf"_*{_SCALING}_{_SIDE}(?:_cache)?"
_OF_CACHE = rf"_*{_SIDE}_cache[._](?:[a-z0-9]+[._])*{_SCALING}(?:_\w+)?"
_PROJECTION = (
    r"(?:(?:k|v|kv|qkv|qkqkv|key|value|key_value|query_key_value)(?:_(?:proj|linear|layer))?|"
    r"[wW](?:k|v|kv|qkv)|W_pack|c_attn)"
)
_OUTPUT = rf"{_PROJECTION}\.(?:output_(?:[a-z0-9]+_)?{_SCALING}(?:_\w+)?|output_quantizer\.\w+)"
_QUANTIZER = rf"{_SIDE}_(?:bmm_|fake_|cache_|output_)?quantizer\.\w+"
_LOOKS_LIKE = re.compile(rf"(?:^|\.)(?:{_LEAF}|{_REVERSED}|{_OF_CACHE}|{_OUTPUT}|{_QUANTIZER})$")
_IN_LAYER = re.compile(rf"{_LAYER}{_OF_ATTENTION}(?P<own>.+)$")
_WORD = re.compile(r"[._]|(?<=[a-z])(?=[A-Z])")
_SCALE_WORD = re.compile(rf"^(?:{_SIDE})?{_SCALING}$")
_SIDE_WORDS = frozenset(
    ["k", "key", "keys", "v", "value", "values", "kv", "cache", "kscale", "vscale", "kvscale"]
)
_OTHER_WORDS = frozenset(
    (
        *("input", "pre", "smooth", "smoothquant", "norm", "layernorm", "ln", "lora", "bias"),
        *("q", "query", "queries", "qk", "rotary", "residual"),
    )
)
"""Scales of activations, queries and normalization, and learned ones."""
_LINEAR = re.compile(rf"(?:^|\.)(?:\w*proj|{_PROJECTION})\.")
_OWN = re.compile(rf"^{_OF_MODEL}(?:layers\.\d+\.|(?!.*\.\d+\.))")


class KVScaleName(NamedTuple):
    """A known name of a scale."""

    layer: int
    sides: str
    """`k`, `v` or `kv`."""
    is_global: bool
    """An encode scale of an NVFP4 cache (2688 / amax); else a decode scale."""


def parse_kv_scale(name: str) -> KVScaleName | None:
    """The layer and meaning of a scale; None if the name is not that of one, or not known."""
    match = _KNOWN.search(name)
    if match is None:
        return None
    sides = next(filter(None, match.group("side", "projection", "cache", "quantizer", "both")))
    return KVScaleName(int(match["layer"]), sides, match["is_global"] is not None)


def is_kv_offset(name: str) -> bool:
    """Whether this is an offset of an affine KV cache, such as ModelOpt's `k_proj.k_bias`."""
    return _OFFSET.search(name) is not None


def looks_like_kv_scale(name: str) -> bool:
    """Whether a name that `parse_kv_scale` does not know seems to be that of a scale of K or V.

    Names of other models in the same files, such as drafts, are excluded.
    """
    if parse_kv_scale(name) is not None or _OTHER_MODELS.search(name):
        return False
    if _OTHER_MODULES.search(name) is not None:
        return False
    return _LOOKS_LIKE.search(name) is not None or _names_scale_of_kv(name)


def _names_scale_of_kv(name: str) -> bool:
    """Whether the name of an attention module's tensor has words for a scale and for K or V.

    In any order; scales of projections' weights and inputs do not count.
    """
    match = _IN_LAYER.search(name)
    if match is None or _LINEAR.search(match["own"]) or "weight_" in match["own"]:
        return False
    words = {word.lower() for word in _WORD.split(match["own"])}
    is_scale = any(_SCALE_WORD.match(word) for word in words)
    return is_scale and bool(words & _SIDE_WORDS) and not words & _OTHER_WORDS


def is_of_layers(name: str) -> bool:
    """Whether a tensor is in the language model's layers or in no layer; else it may be of another
    model in the same files."""
    return _OWN.search(name) is not None
