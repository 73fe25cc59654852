"""Prints the requirements of an extra, without halfbyte itself, which pip would build once more.

python dev/extra.py dev | pip install --requirement /dev/stdin
"""

import sys
import tomllib
from pathlib import Path

with (Path(__file__).parents[1] / "pyproject.toml").open("rb") as file:
    extras = tomllib.load(file)["project"]["optional-dependencies"]
print("\n".join(extras[sys.argv[1]]))
