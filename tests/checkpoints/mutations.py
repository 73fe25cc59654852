"""Random corruptions of checkpoint folders, reproducible by seed."""

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

JSON_FILES = (
    *("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"),
    *("hf_quant_config.json", "model.safetensors.index.json", "kv_scales.json"),
    "special_tokens_map.json",
)
Fields = dict[str, Any]

VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 3, 7, 64, 10**7, 2**31, 2**40, 10**9, 2**63, 10**30, -(2**70)),
    *(0.0, 0.5, -0.5, 1e308, 1e-320, float("nan"), float("inf"), -float("inf")),
    *("", "x", "9", "frob", "NVFP4", "fp8", "float16", "torch.float32", "../../../etc/passwd"),
    *("/dev/zero", "a\nb", "\x1b[31mred", "\ud800", "x" * 5000, "evil.Evil", "org/repo--evil.E"),
    *([], [[]], {}, [None], {"a": 1}, [1, 2, 3], ["x"], {"": {"": []}}, [[[[[[1]]]]]]),
)

CONFIG_KEYS = (
    *("num_hidden_layers", "vocab_size", "hidden_size", "intermediate_size", "head_dim"),
    *("num_attention_heads", "num_key_value_heads", "max_position_embeddings", "hidden_act"),
    *("rope_parameters", "rope_theta", "rope_scaling", "layer_types", "sliding_window", "dtype"),
    *("torch_dtype", "tie_word_embeddings", "eos_token_id", "bos_token_id", "pad_token_id"),
    *("model_type", "architectures", "auto_map", "attn_implementation", "quantization_config"),
    *("text_config", "rms_norm_eps", "attention_bias", "use_bidirectional_attention", "is_causal"),
    *("num_experts", "num_experts_per_tok", "compression_config", "quantization", "mlp_bias"),
    *("attention_chunk_size", "use_cache", "initializer_range", "id2label", "problem_type"),
)
ARGS: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("num_bits", (4, 8, 2, "4", True)),
    ("type", ("float", "int", "FLOAT", 3)),
    ("strategy", (None, "tensor", "channel", "tensor_group", "attn_head", "group", "block")),
    ("group_size", (None, 16, 32, 128, -1, 0)),
    ("symmetric", (True, False, None, 1)),
    ("dynamic", (False, True, "local", None)),
    ("scale_dtype", (None, "torch.float8_e4m3fn", "torch.uint8", "torch.float32")),
    ("actorder", (None, "group", "static")),
    ("zero_point", (None, 7)),
)
SECTION_KEYS = (
    *("quant_method", "quant_algo", "kv_cache_quant_algo", "kv_cache_scheme", "format", "ignore"),
    *("config_groups", "group_size", "exclude_modules", "quantized_layers", "sparsity_config"),
    *("transform_config", "kv_cache_quantized_layers", "kv_cache_schema_version", "provider"),
)
TOKENIZER_PARTS: tuple[Fields, ...] = (
    {"model": {"continuing_subword_prefix": "##"}},
    {"model": {"end_of_word_suffix": "</w>"}},
    {"model": {"unk_token": "nope"}},
    {"model": {"dropout": 5.0}},
    {"model": {"type": "Unigram", "unk_id": 99, "vocab": [["a", 0.0]]}},
    {"model": {"type": "WordPiece", "unk_token": "[X]", "vocab": {"a": 0}}},
    {"model": {"vocab": {}, "merges": []}},
    {"model": {"merges": [["a", "b"], ["zz", "zz"]]}},
    {"normalizer": {"type": "Replace", "pattern": {"String": ""}, "content": "aa"}},
    {"normalizer": {"type": "Prepend", "prepend": "a" * 1000}},
    {"post_processor": {"type": "TemplateProcessing", "single": [], "pair": []}},
    {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(x+x+)+y"}, "behavior": "Isolated"}},
    {"padding": {"strategy": {"Fixed": 2**60}, "direction": "Right", "pad_id": 0}},
    {"truncation": {"direction": "Right", "max_length": 0, "strategy": "LongestFirst"}},
    {"decoder": {"type": "Strip", "content": "a", "start": 2**60, "stop": 2**60}},
    {"added_tokens": [{"id": 2**32 - 1, "content": "<x>", "special": True}]},
)
BROKEN_TEXTS = (
    *(b"", b"{", b"[]", b"null", b"\xff\xfe{}", b"{}" + b"\0" * 9, b"[" * 100_000),
    *(b'{"a":' * 5000, b'{"a": 1' + b"0" * 10_000 + b"}", b'{"a": NaN}', b'"text"', b"{}"),
)


def mutate(folder: Path, random: Random) -> list[str]:
    """Corrupt a folder in one to three places; returns what was done, for messages."""
    return [random.choice(MUTATIONS)(folder, random) for _ in range(random.choice((1, 1, 2, 3)))]


def change_json(folder: Path, random: Random) -> str:
    """Change a value at a random place of a random JSON file, or add or remove a key."""
    file = folder / random.choice([n for n in JSON_FILES if (folder / n).is_file()] or ["x.json"])
    fields = _read(file)
    if fields is None:
        return "nothing"
    if file.name == "config.json" and random.random() < 0.5:
        key = random.choice(CONFIG_KEYS)
        fields[key] = value = _value(random, fields.get(key))
        return _write(file, fields, f"{key} = {value!r}"[:200])
    place: Any = fields
    path: list[Any] = []
    while place:
        path.append(random.choice(list(place if isinstance(place, dict) else range(len(place)))))
        inner = place[path[-1]]
        if isinstance(inner, dict | list) and inner and random.random() < 0.7:
            place = inner
            continue
        if random.random() < 0.15:
            del place[path[-1]]
            return _write(file, fields, f"without {path}"[:200])
        place[path[-1]] = value = _value(random, inner)
        return _write(file, fields, f"{path} = {value!r}"[:200])
    return "nothing"


def change_declaration(folder: Path, random: Random) -> str:
    """Change a field of the quantization's declaration."""
    fields = _read(folder / "config.json")
    if fields is None:
        return "nothing"
    section = fields.get("quantization_config")
    section = section if isinstance(section, dict) else {}
    fields["quantization_config"] = section
    what = random.randrange(4)
    if what == 0:
        section["kv_cache_scheme"] = _args(random)
        done = f"kv_cache_scheme = {section['kv_cache_scheme']}"
    elif what == 1:
        algos = ("FP8", "NVFP4", "FP8_K_NVFP4_V", "INT8", None, 3)
        names = ("model.layers.0.self_attn", "model.layers.99.self_attn", "x", "layers.1.attn")
        section["kv_cache_quantized_layers"] = {
            name: {"quant_algo": random.choice(algos)} for name in random.sample(names, 2)
        }
        done = f"kv_cache_quantized_layers = {section['kv_cache_quantized_layers']}"
    elif what == 2 and isinstance(section.get("config_groups"), dict):
        for group in section["config_groups"].values():
            if isinstance(group, dict):
                group[random.choice(("weights", "input_activations", "output_activations"))] = (
                    _args(random)
                )
        done = f"config_groups = {section['config_groups']}"
    else:
        key = random.choice(SECTION_KEYS)
        section[key] = _value(random, section.get(key))
        done = f"quantization_config.{key} = {section[key]!r}"
    return _write(folder / "config.json", fields, done[:300])


def change_tokenizer(folder: Path, random: Random) -> str:
    """Put something unexpected into `tokenizer.json`."""
    file = folder / "tokenizer.json"
    fields = _read(file)
    if fields is None:
        return "nothing"
    part = random.choice(TOKENIZER_PARTS)
    for key, value in part.items():
        if key == "model" and isinstance(fields.get(key), dict):
            fields[key] = {**fields[key], **value}
        else:
            fields[key] = value
    return _write(file, fields, str(part)[:200])


def break_text(folder: Path, random: Random) -> str:
    """Change bytes of a file, truncate it, or remove it."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    if not files:
        return "nothing"
    file = random.choice(files)
    data = bytearray(file.read_bytes())
    what = random.randrange(4)
    if what == 0:
        data = bytearray(random.choice(BROKEN_TEXTS))
    elif what == 1:
        del data[random.randrange(len(data) + 1) :]
    elif what == 2:
        for _ in range(random.choice((1, 1, 20))):
            if data:
                data[random.randrange(min(len(data), 4000))] = random.randrange(256)
    else:
        file.unlink()
        return f"{file.name}: removed"
    file.write_bytes(data)
    return f"{file.name}: bytes ({what})"


def replace_file(folder: Path, random: Random) -> str:
    """Replace a file by a pipe, a folder or a link."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    if not files:
        return "nothing"
    file = random.choice(files)
    file.unlink()
    what = random.choice(("pipe", "folder", "nothing", "loop", "/dev/zero"))
    if what == "pipe":
        os.mkfifo(file)
    elif what == "folder":
        file.mkdir()
    else:
        file.symlink_to({"nothing": "absent", "loop": file.name}.get(what, what))
    return f"{file.name}: {what}"


def change_header(folder: Path, random: Random) -> str:
    """Change a tensor's dtype, shape, offsets or name in a header."""
    file = _weights(folder, random)
    if file is None:
        return "nothing"
    header, data = _read_safetensors(file)
    names = [name for name in header if name != "__metadata__"]
    if not names:
        return "nothing"
    name = random.choice(names)
    entry = header[name]
    if not isinstance(entry, dict):
        return "nothing"
    what = random.randrange(6)
    if what == 0:
        entry["dtype"] = random.choice(("F32", "BF16", "U8", "F8_E4M3", "F4", "I64", "X", 3, None))
    elif what == 1:
        entry["shape"] = random.choice(([], [0], [2**62, 4], [-1], [1, 1, 1], "x", [2**31], [1]))
    elif what == 2:
        entry["data_offsets"] = random.choice(([0, 0], [0, 2**63], [8, 4], [], "x", [0, 8]))
    elif what == 3:
        other = random.choice(("x", "model.layers.999999999.x", "", "a" * 5000, "layers.0.k_bias"))
        header[other] = header.pop(name)
    elif what == 4:
        del header[name]
    else:
        side = random.choice("kv")
        header[f"model.layers.{random.choice((0, 1, 77))}.self_attn.{side}_scale"] = {
            **entry,
            "data_offsets": [len(data), len(data) + 4],
            **random.choice(({}, {"dtype": "F32", "shape": [1]})),
        }
        data += struct.pack("<f", random.choice((0.0, -1.0, float("nan"), 0.05, 1e30)))
    size = random.choice((None, None, None, None, 2**63, 0, 7, 10**8))
    _write_safetensors(file, header, data, size)
    return f"{file.name}: header of {name} ({what}), length {size}"[:200]


def change_scales(folder: Path, random: Random) -> str:
    """Put invalid numbers into tensors named as scales."""
    file = _weights(folder, random)
    if file is None:
        return "nothing"
    header, data = _read_safetensors(file)
    names = [name for name in header if "scale" in name]
    if not names:
        return "nothing"
    name = random.choice(names)
    try:
        start, end = header[name]["data_offsets"]
        end = min(end, len(data))
    except (ValueError, TypeError):  # changed before
        return "nothing"
    number = random.choice((0.0, -1.0, float("nan"), float("inf"), 1e-30, 1e30, -0.0))
    data[start:end] = (struct.pack("<f", number) * (end - start))[: end - start]
    _write_safetensors(file, header, data, None)
    return f"{file.name}: {name} = {number}"


MUTATIONS: tuple[Callable[[Path, Random], str], ...] = (
    *(change_json, change_json, change_json, change_declaration, change_declaration),
    *(change_tokenizer, break_text, replace_file, change_header, change_header, change_scales),
)


def _value(random: Random, old: Any) -> Any:
    """A new value: unrelated to the old one, or similar enough to be mistaken for it."""
    if random.random() < 0.6:
        return random.choice(VALUES)
    like: list[Any] = [[old], {"value": old}, str(old)]
    if isinstance(old, int | float):
        like += [old + 1, old * 1000, -old, float(old)]
    if isinstance(old, list):
        like += [old * 2, old[:1], {str(i): x for i, x in enumerate(old)}]
    if isinstance(old, str):
        like += [old.upper(), old * 2, old[:-1]]
    return random.choice(like)


def _args(random: Random) -> Fields:
    return {name: random.choice(v) for name, v in ARGS if random.random() < 0.7}


def _read(file: Path) -> Fields | None:
    try:
        fields = json.loads(file.read_bytes()) if file.is_file() else None
    except (ValueError, RecursionError):
        return None
    return fields if isinstance(fields, dict) else None


def _write(file: Path, fields: Fields, done: str) -> str:
    file.write_text(json.dumps(fields))
    return f"{file.name}: {done}"


def _weights(folder: Path, random: Random) -> Path | None:
    files = [file for file in sorted(folder.glob("*.safetensors")) if file.is_file()]
    files = [file for file in files if _is_whole(file)]
    return random.choice(files) if files else None


def _is_whole(file: Path) -> bool:
    try:
        _read_safetensors(file)
    except (ValueError, struct.error, AttributeError, RecursionError):
        return False
    return True


def _read_safetensors(file: Path) -> tuple[Fields, bytearray]:
    content = file.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + size])
    return header, bytearray(content[8 + size :])


def _write_safetensors(file: Path, header: Fields, data: bytearray, size: int | None) -> None:
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text) if size is None else size) + text + data)
