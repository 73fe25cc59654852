"""Tries what `make release` built, the wheel and the source archive.

Both must be whole, and each must run when it is installed in an environment of its own.

python dev/check_release.py dist
"""

import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

SOURCES = (
    "Makefile",
    "docs/index.md",
    "mkdocs.yml",
    "tests/test_house.py",
    "src/halfbyte/kernels/cpu/api.h",
    "src/halfbyte/attention/decode/decode.cu",
)
PACKAGED = ("py.typed", "attention/decode/decode.cu", "kernels/runtime/basics.cuh")


def main() -> None:
    """Check the one wheel and the one source archive of a folder."""
    folder = Path(sys.argv[1])
    (wheel,), (archive,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        held = {name.partition("/")[2] for name in opened.getnames()}
    missing = [name for name in SOURCES if name not in held]
    with zipfile.ZipFile(wheel) as opened_wheel:
        names = opened_wheel.namelist()
    missing += [name for name in PACKAGED if f"halfbyte/{name}" not in names]
    if not any(name.startswith("halfbyte/kernels/_cpu") for name in names):
        missing.append("halfbyte/kernels/_cpu, the kernels for CPUs: was there a C++ compiler?")
    if missing:
        sys.exit(f"{folder}: without {', '.join(missing)}")
    for package in (wheel, archive):
        _try(package.absolute())
    print(f"{archive.name} and {wheel.name} are whole, and run")


def _try(package: Path) -> None:
    """Install a package in an empty environment, from the archive by building it, and run it."""
    print(f"==> {package.name} in an empty environment", flush=True)
    constraints = Path(__file__).absolute().parents[1] / "constraints.txt"
    with tempfile.TemporaryDirectory() as place:
        venv.create(place, with_pip=True)
        python = Path(place) / "bin" / "python"
        install = [str(python), "-m", "pip", "install", "-qq", "--constraint", str(constraints)]
        subprocess.run([*install, str(package)], check=True)
        if not list(Path(place).rglob("site-packages/halfbyte/kernels/_cpu*")):
            sys.exit(f"{package.name}: installed without halfbyte/kernels/_cpu")
        for command in (["info"], ["generate", "--max-tokens", "8", "--prompt", "def main("]):
            subprocess.run([Path(place) / "bin" / "halfbyte", *command], check=True, cwd=place)


if __name__ == "__main__":
    main()
