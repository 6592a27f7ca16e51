"""The benchmarks are scripts in a folder of their own; tests import them as they import each other."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # last: a script may be called like a package
