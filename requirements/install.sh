#!/usr/bin/env bash
# Install rlinf with one model and one simulator into a virtual environment; `-h` explains.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() {
  cat <<EOF
usage: bash requirements/install.sh embodied --model NAME --env NAME [options]

  --model NAME   policy to install for: $(names models)
  --env NAME     simulator to install: $(names envs)
  --venv DIR     virtual environment to make or to add to (default .venv)
  --no-root      leave system libraries alone; \`rlinf doctor\` says what is missing
  -h, --help     this text

Versions are those of constraints.txt. PYTHON=python3.12 chooses the interpreter of a new environment.
EOF
}

# The NAMEs of requirements/$1/NAME.txt, on one line.
names() {
  for file in requirements/"$1"/*.txt; do basename "$file" .txt; done | paste -sd ' '
}

fail() {
  echo "install.sh: $1" >&2
  exit 1
}

# The requirements of one part: $1 is the option, $2 the folder, $3 the name that was given.
requirements_file() {
  [[ -n $3 ]] || fail "--$1 is missing; available: $(names "$2")"
  [[ $3 != */* && -f requirements/$2/$3.txt ]] || fail "unknown $1 '$3'; available: $(names "$2")"
  echo "requirements/$2/$3.txt"
}

model="" env="" venv=.venv root=yes target=""
[[ $# -gt 0 ]] || { usage && exit 0; }
while [[ $# -gt 0 ]]; do
  case $1 in
    -h | --help) usage && exit 0 ;;
    --no-root) root=no && shift ;;
    --model | --env | --venv)
      [[ $# -gt 1 ]] || fail "$1 needs a value"
      printf -v "${1#--}" '%s' "$2"
      shift 2
      ;;
    -*) fail "unknown option '$1'; see: bash requirements/install.sh -h" ;;
    *)
      [[ -z $target ]] || fail "one target only, got '$target' and '$1'"
      target=$1 && shift
      ;;
  esac
done
# Names as other guides write them.
model=${model//-/_}
[[ $env != maniskill_libero ]] || env=maniskill
[[ ${target:-embodied} == embodied ]] || fail "unknown target '$target'; available: embodied"
model_file=$(requirements_file model models "$model")
env_file=$(requirements_file env envs "$env")

if [[ $root == yes ]]; then bash requirements/system.sh; fi

python=${PYTHON:-python3}
command -v "$python" >/dev/null || fail "$python was not found; install Python 3.11 or newer, or set PYTHON"
[[ -x $venv/bin/python ]] || "$python" -m venv "$venv"
"$venv/bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
  fail "$venv holds $("$venv/bin/python" -V); rlinf needs Python 3.11 or newer"

pip=("$venv/bin/python" -m pip install -q --disable-pip-version-check -c constraints.txt)
echo "torch"
"${pip[@]}" torch
echo "rlinf with $model and $env"
"${pip[@]}" -e '.[datasets,video,tensorboard]' -r "$model_file" -r "$env_file"

# What pip cannot bring: the driver a simulator draws with and the files it reads.
if [[ $env == maniskill && $root == yes ]]; then bash requirements/vulkan.sh "$venv"; fi
if [[ -f requirements/envs/$env.sh ]]; then PATH="$(cd "$venv" && pwd)/bin:$PATH" bash "requirements/envs/$env.sh"; fi

echo "done; use it with:  source $venv/bin/activate"
echo "check it with:      $venv/bin/rlinf doctor"
