#!/usr/bin/env bash
# Lay out RoboTwin's code and assets: bash requirements/envs/robotwin.sh [FOLDER]
# FOLDER is by default ROBOTWIN_PATH, else data/robotwin, where rlinf looks by itself. A checkout that is there is taken as it is; else the branch
# RLinf_support is cloned at the commit that rlinf is made for. ROBOTWIN_REPO names another copy of the repository (a URL or a folder).
# Assets: ASSETS_PATH names a folder that holds assets/, else they are fetched into FOLDER from ROBOTWIN_ASSETS, a dataset of the hub or a folder
# with its zip files. ROBOTWIN_PARTS="embodiments objects" leaves out the 11 GB of table and wall textures, which only domain randomisation needs; an empty value
# fetches no assets.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
own=$root/data/robotwin
folder=${1:-${ROBOTWIN_PATH:-$own}}
repo=${ROBOTWIN_REPO:-https://github.com/RoboTwin-Platform/RoboTwin.git}
commit=${ROBOTWIN_COMMIT:-0008ae6800df9f75fc8de7098bacb01735fd8fd2}
hub=${ROBOTWIN_ASSETS:-TianxingChen/RoboTwin2.0}
parts=${ROBOTWIN_PARTS-embodiments objects background_texture}

fail() {
  echo "robotwin.sh: $1" >&2
  exit 1
}

if [[ -f $folder/robotwin/envs/vector_env.py ]]; then
  found=$(git -C "$folder" rev-parse HEAD 2>/dev/null || echo unknown)
  echo "RoboTwin is in $folder already"
  [[ $found == "$commit" ]] || echo "it is at commit ${found:0:8}, rlinf is made for ${commit:0:8}:  git -C $folder checkout $commit"
elif [[ -n $(ls -A "$folder" 2>/dev/null) ]]; then
  fail "$folder is not a checkout of RoboTwin's branch RLinf_support: it has no robotwin/envs/vector_env.py; move it away, or set ROBOTWIN_PATH to another folder"
else
  command -v git >/dev/null || fail "git was not found"
  echo "fetching $repo at ${commit:0:8} (about 8 MB)"
  mkdir -p "$(dirname "$folder")"
  rm -rf "$folder.part"
  trap 'rm -rf "$folder.part"' EXIT
  git clone -q --branch RLinf_support "$repo" "$folder.part" ||
    fail "cannot clone the branch RLinf_support of $repo; set ROBOTWIN_PATH to a checkout, or ROBOTWIN_REPO to a copy"
  git -C "$folder.part" -c advice.detachedHead=false checkout -q "$commit" || fail "$repo has no commit $commit"
  if [[ -d $folder ]]; then rmdir "$folder"; fi
  mv "$folder.part" "$folder" # last: a folder that is there is complete
  echo "RoboTwin is in $folder"
fi
folder=$(cd "$folder" && pwd)

# Unpack one part of the assets: $1 its name. A half part is never left in its place.
fetch_part() {
  local zip=$work/$1.zip
  if [[ -d $hub ]]; then
    zip=$hub/$1.zip
  else
    hf download --repo-type dataset "$hub" "$1.zip" --local-dir "$work" >/dev/null || return 1
  fi
  python3 -m zipfile -e "$zip" "$work/unpacked" || return 1
  mkdir -p "$folder/assets"
  mv "$work/unpacked/$1" "$folder/assets/$1"
  if [[ $zip == "$work"/* ]]; then rm "$zip"; fi
}

# Why there are no assets, and what a person can do about it; the rest of the installation stands.
without_assets() {
  echo "robotwin.sh: $1; without assets nothing can be simulated: run this script again where there is a network," >&2
  echo "robotwin.sh: or set ASSETS_PATH to a folder that holds assets/embodiments and assets/objects" >&2
  rmdir "$work" 2>/dev/null || true # what was fetched of a part stays for the next call
  exit 0
}

if [[ -n ${ASSETS_PATH:-} ]]; then
  [[ -d $ASSETS_PATH/assets/embodiments ]] || fail "ASSETS_PATH=$ASSETS_PATH holds no assets/embodiments; it must be the folder that holds assets/"
  assets=$(cd "$ASSETS_PATH" && pwd)
  link=$root/data/robotwin_assets
  if [[ ! -e $link || -L $link ]]; then mkdir -p "$root/data" && ln -sfn "$assets" "$link"; fi
  echo "the assets are in $assets, to which data/robotwin_assets leads"
else
  # Beside the checkout, as parts of 11 GB must be moved, not copied, to their place.
  work=$folder/assets/.part
  for part in $parts; do
    if [[ -d $folder/assets/$part ]]; then continue; fi
    echo "the assets' $part from $hub"
    [[ -d $hub ]] || command -v hf >/dev/null || without_assets "the command hf was not found (pip install huggingface_hub)"
    mkdir -p "$work"
    fetch_part "$part" || without_assets "cannot fetch $part.zip from $hub"
    if [[ $part == embodiments ]]; then (cd "$folder" && python3 script/update_embodiment_config_path.py </dev/null >/dev/null) || fail "$folder/script/update_embodiment_config_path.py failed"; fi
  done
  rm -rf "$work"
  if [[ -n $parts ]]; then echo "the assets are in $folder/assets"; else echo "ROBOTWIN_PARTS is empty: no assets were fetched"; fi
fi
[[ $folder -ef $own ]] || echo "tell rlinf where it is:  export ROBOTWIN_PATH=$folder"
