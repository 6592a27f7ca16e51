#!/usr/bin/env bash
# Lay out CALVIN's files: bash requirements/envs/calvin.sh [FOLDER]
# FOLDER is by default CALVIN_PATH, else data/calvin, where rlinf looks by itself. Takes the URDFs, meshes and textures from mees/calvin_env and the
# tasks and sentences from mees/calvin. CALVIN_ENV_REPO and CALVIN_REPO name other copies of the two (a URL or a folder).
set -euo pipefail

own=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)/data/calvin
folder=${1:-${CALVIN_PATH:-$own}}
env_repo=${CALVIN_ENV_REPO:-https://github.com/mees/calvin_env.git}
repo=${CALVIN_REPO:-https://github.com/mees/calvin.git}
# The main branch, not the older commit that mees/calvin pins: there a press does not turn off an LED that starts lit.
env_commit=${CALVIN_ENV_COMMIT:-797142c588c21e76717268b7b430958dbd13bf48}

fail() {
  echo "calvin.sh: $1" >&2
  exit 1
}

if [[ -d $folder/data && -d $folder/tasks ]]; then
  echo "CALVIN's files are in $folder already; remove it to fetch them again"
elif [[ -e $folder/data ]]; then
  fail "$folder/data exists and is not CALVIN's; move it away, or set CALVIN_PATH to another folder"
else
  command -v git >/dev/null || fail "git was not found"
  work=$(mktemp -d)
  trap 'rm -rf "$work"' EXIT
  echo "fetching $env_repo (about 31 MB)"
  git clone -q "$env_repo" "$work/calvin_env" || fail "cannot clone $env_repo; set CALVIN_ENV_REPO to a copy of it"
  git -C "$work/calvin_env" -c advice.detachedHead=false checkout -q "$env_commit" ||
    fail "$env_repo has no commit $env_commit"
  echo "fetching $repo (tasks and sentences only)"
  git clone -q --depth 1 --filter=blob:none --no-checkout "$repo" "$work/calvin" ||
    fail "cannot clone $repo; set CALVIN_REPO to a copy of it"
  git -C "$work/calvin" checkout -q HEAD -- LICENSE calvin_models/conf/annotations \
    calvin_models/conf/callbacks/rollout/tasks || fail "$repo lacks the task and annotation files"
  mkdir -p "$folder/tasks"
  cp -r "$work/calvin_env/conf" "$work/calvin_env/LICENSE" "$folder/"
  cp "$work/calvin/calvin_models/conf/annotations/"new_playtable*.yaml "$folder/tasks/"
  cp "$work/calvin/calvin_models/conf/callbacks/rollout/tasks/new_playtable_tasks.yaml" "$folder/tasks/"
  cp -r "$work/calvin_env/data" "$folder/data.part"
  mv "$folder/data.part" "$folder/data" # last: a folder with data/ and tasks/ is complete
  echo "CALVIN's files are in $folder (MIT licence; the Franka model is Apache-2.0)"
fi
[[ $folder -ef $own ]] || echo "tell rlinf where they are:  export CALVIN_PATH=$(cd "$folder" && pwd)"
