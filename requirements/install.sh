#!/usr/bin/env bash
# Install rlinf with one model and one simulator into a virtual environment; `-h` explains.
# The tables are folders: requirements/models/NAME.txt and requirements/envs/NAME.txt hold the packages of a name, and
# requirements/envs/NAME.sh lays out the files that it reads. Lines of envs/NAME.txt that this script reads:
#   # python 3.13: TEXT   what is missing with that Python and newer ones
#   # files: VARIABLE     the variable that names another folder than data/NAME for the files
#   # environment: VARIABLE  NAME has an environment of its own, data/NAME_venv; the variable names another interpreter
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() {
  cat <<EOF
usage: bash requirements/install.sh embodied --model NAME --env NAME [options]

  --model NAME   policy to install for: $(names models)
  --env NAME     simulator to install: $(names envs)
  --venv DIR     virtual environment to make or to add to (default .venv)
  --robotwin-path DIR
                 a checkout of RoboTwin that is there already, or where to clone it (default ROBOTWIN_PATH, else data/robotwin)
  --use-mirror   fetch from mirrors of GitHub and Hugging Face, for this call only
  --no-root      leave system libraries alone; \`rlinf doctor\` says what is missing
  --dry-run      print the commands and change nothing
  -h, --help     this text

Names may be written as in the guides (openvla-oft, OpenPI, maniskill_libero). Versions are those of constraints.txt.
PYTHON=python3.12 chooses the interpreter of a new environment. Mirrors: GITHUB_MIRROR, HF_ENDPOINT and PIP_INDEX_URL.
A second call adds what is missing and fetches nothing twice.
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

# Run a command, or print it with --dry-run.
run() {
  if [[ $dry_run == yes ]]; then printf '+%s\n' "$(printf ' %q' "$@")"; else "$@"; fi
}

# The requirements of one part: $1 is the option, $2 the folder, $3 the name that was given.
requirements_file() {
  [[ -n $3 ]] || fail "--$1 is missing; available: $(names "$2")"
  [[ $3 != */* && -f requirements/$2/$3.txt ]] || fail "unknown $1 '$3'; available: $(names "$2")"
  echo "requirements/$2/$3.txt"
}

# What the table of the simulator says under a word: $1 the word (a basic regular expression), $2 what to print before it.
row() {
  sed -n "s/^# $1: */${2:-}/p" "$env_file"
}

# Mirrors reach git, pip and the hub through the environment of this process alone: no configuration file is written.
use_mirrors() {
  local github=${GITHUB_MIRROR:-https://ghfast.top/github.com/} count=${GIT_CONFIG_COUNT:-0}
  export HF_ENDPOINT=${HF_ENDPOINT:-https://hf-mirror.com}
  export "GIT_CONFIG_KEY_$count=url.$github.insteadOf" "GIT_CONFIG_VALUE_$count=https://github.com/"
  export GIT_CONFIG_COUNT=$((count + 1))
  echo "mirrors: $github for GitHub, $HF_ENDPOINT for Hugging Face, ${PIP_INDEX_URL:-the index that pip is set up with} for packages"
}

# Make data/$1 lead to folder $2, so that the simulator finds it without a variable. A real folder there is left alone.
remember() {
  if [[ $2 == "$(pwd -P)/data/$1" || $2 == "$(realpath -m "data/$1")" || (-e data/$1 && ! -L data/$1) ]]; then return; fi
  run mkdir -p data
  run ln -sfn "$2" "data/$1"
  echo "data/$1 leads to $2, so no variable needs to name it"
}

model="" env="" venv=.venv root=yes target="" mirror=no dry_run=no
[[ $# -gt 0 ]] || { usage && exit 0; }
while [[ $# -gt 0 ]]; do
  case $1 in
    -h | --help) usage && exit 0 ;;
    --no-root) root=no && shift ;;
    --use-mirror) mirror=yes && shift ;;
    --dry-run) dry_run=yes && shift ;;
    --robotwin-path)
      [[ $# -gt 1 ]] || fail "$1 needs a value"
      export ROBOTWIN_PATH=$2
      shift 2
      ;;
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
# Names as the guides write them.
model=${model,,} env=${env,,}
model=${model//-/_}
[[ $env != maniskill_libero ]] || env=maniskill
[[ ${target:-embodied} == embodied ]] || fail "unknown target '$target'; available: embodied"
model_file=$(requirements_file model models "$model")
env_file=$(requirements_file env envs "$env")

if [[ $mirror == yes ]]; then use_mirrors; fi
if [[ $root == yes ]]; then run bash requirements/system.sh; fi

python=${PYTHON:-python3}
command -v "$python" >/dev/null || fail "$python was not found; install Python 3.11 or newer, or set PYTHON"
interpreter=$venv/bin/python
[[ -x $interpreter ]] || run "$python" -m venv "$venv"
[[ -x $interpreter ]] || interpreter=$python # a dry run made no environment
"$interpreter" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
  fail "$interpreter is $("$interpreter" -V); rlinf needs Python 3.11 or newer"
# A simulator with an environment of its own: one that a variable names, now or earlier, is taken as it is, else it is made.
variable=$(row environment)
sim_python=${variable:+${!variable:-data/${env}_venv/bin/python}}
while read -r version text; do
  if "$interpreter" -c "import sys; sys.exit(sys.version_info < (${version/./, }))"; then
    [[ -z $sim_python || -x $sim_python ]] || fail "$("$interpreter" -V): $text"
    echo "$("$interpreter" -V): $text"
  fi
done < <(row 'python \(3\.[0-9]*\)' '\1 ')

pip=(-m pip install -q --disable-pip-version-check)
tables=(-r "$model_file")
[[ -n $sim_python ]] || tables+=(-r "$env_file")
echo "torch"
run "$venv/bin/python" "${pip[@]}" -c constraints.txt torch
echo "rlinf with $model and $env"
run "$venv/bin/python" "${pip[@]}" -c constraints.txt -e '.[datasets,video,tensorboard,wandb,swanlab,ray]' "${tables[@]}"

sim_venv=$venv
if [[ -n $sim_python ]]; then
  sim_venv=$(dirname "$(dirname "$sim_python")")
  if [[ -x $sim_python && (-n ${!variable:-} || -L data/${env}_venv) ]]; then
    echo "$env runs with $sim_python, which is left as it is"
  else
    echo "an environment of its own for $env: $sim_venv"
    [[ -x $sim_python ]] || run "$interpreter" -m venv "$sim_venv"
    run "$sim_python" "${pip[@]}" -r "$env_file"
  fi
  remember "${env}_venv" "$(realpath -ms "$sim_venv")"
fi

# What pip cannot bring: the driver a simulator draws with and the files it reads.
if [[ $env == maniskill || $env == robotwin ]] && [[ $root == yes ]]; then run bash requirements/vulkan.sh "$sim_venv"; fi
if [[ -f requirements/envs/$env.sh ]]; then
  variable=$(row files)
  files=${!variable:-data/$env}
  remember "$env" "$(realpath -m "$files")"
  PATH="$(realpath -m "$venv")/bin:$PATH" run bash "requirements/envs/$env.sh" "$files"
fi

if [[ $dry_run == yes ]]; then echo "dry run: nothing was changed" && exit 0; fi
echo "done; use it with:  source $venv/bin/activate"
echo "check it with:      $venv/bin/rlinf doctor"
