#!/usr/bin/env bash
# Refuse a Python that rlinf does not run on, in one line: bash requirements/python.sh [INTERPRETER]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${1:-python3}
least=$(sed -n 's/^requires-python = ">=\(.*\)"$/\1/p' pyproject.toml)
found=$("$python" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null) || found="not found"
if [[ $found == [0-9]* && $(printf '%s\n%s\n' "$least" "$found" | sort -V | head -n 1) == "$least" ]]; then exit 0; fi
echo "rlinf needs Python $least or newer; $python is $found: name another with PYTHON=python$least, and remove .venv if it holds an older one" >&2
exit 1
