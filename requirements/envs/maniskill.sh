#!/usr/bin/env bash
# Lay out the assets of ManiSkill's put-on-plate tasks: bash requirements/envs/maniskill.sh [FOLDER]
# FOLDER is by default MANISKILL_ASSET_DIR, else data/maniskill, where rlinf looks by itself. Parts that are there already are not fetched again.
# MANISKILL_ASSETS (a dataset of the hub or a folder with carrot/), WIDOWX_REPO (a git URL or a folder) and BRIDGE_ASSETS
# (a dataset of the hub, a zip file or a folder with stages/) name other copies. HF_ENDPOINT chooses another hub.
set -euo pipefail

own=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)/data/maniskill
folder=${1:-${MANISKILL_ASSET_DIR:-$own}}
assets=${MANISKILL_ASSETS:-RLinf/maniskill_assets}
widowx=${WIDOWX_REPO:-https://github.com/haosulab/ManiSkill-WidowX250S.git}
widowx_tag=${WIDOWX_TAG:-v0.2.0} # the one that ManiSkill 3.0.1 itself downloads
bridge=${BRIDGE_ASSETS:-haosulab/ManiSkill_bridge_v2_real2sim}
bridge_zip=bridge_v2_real2sim_dataset.zip

fail() {
  echo "maniskill.sh: $1" >&2
  exit 1
}

# Download a dataset of the hub: $1 its name, $2 the variable that names another copy, $3 the folder, then files of it.
from_hub() {
  local name=$1 variable=$2 into=$3
  shift 3
  command -v hf >/dev/null || fail "the command hf was not found; pip install huggingface_hub, or set $variable to a copy of $name"
  hf download --repo-type dataset "$name" "$@" --local-dir "$into" >/dev/null ||
    fail "cannot download $name; set $variable to a copy of it"
}

# Move a finished part to its place in one step: $1 the folder that was made, $2 the place, $3 a file it must hold.
settle() {
  [[ -e $1/$3 ]] || fail "$1 holds no $3; it is not a copy of what $2 needs"
  mkdir -p "$(dirname "$2")"
  rm -rf "$2.part"
  cp -r "$1" "$2.part"
  rm -rf "$2.part/.git" "$2.part/.cache"
  mv "$2.part" "$2"
  echo "$2 is complete"
}

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

if [[ ! -d $folder/carrot ]]; then
  echo "objects, plates and table pictures from $assets"
  if [[ ! -d $assets ]]; then from_hub "$assets" MANISKILL_ASSETS "$work/assets" && assets=$work/assets; fi
  settle "$assets/carrot" "$folder/carrot" more_carrot/model_db.json
fi

robot=$folder/data/robots/widowx
if [[ ! -d $robot ]]; then
  echo "the WidowX arm from $widowx"
  if [[ ! -f $widowx/wx250s.urdf ]]; then
    command -v git >/dev/null || fail "git was not found"
    git -c advice.detachedHead=false clone -q --depth 1 --branch "$widowx_tag" "$widowx" "$work/widowx" ||
      fail "cannot clone $widowx at $widowx_tag; set WIDOWX_REPO to a copy of it"
    widowx=$work/widowx
  fi
  settle "$widowx" "$robot" wx250s.urdf
fi

scene=$folder/data/tasks/bridge_v2_real2sim_dataset
if [[ ! -d $scene ]]; then
  echo "the table of the bridge scene from $bridge"
  if [[ ! -e $bridge ]]; then from_hub "$bridge" BRIDGE_ASSETS "$work" $bridge_zip && bridge=$work/$bridge_zip; fi
  if [[ -f $bridge ]]; then
    mkdir "$work/bridge"
    python3 -m zipfile -e "$bridge" "$work/bridge" || fail "cannot unpack $bridge; set BRIDGE_ASSETS to a copy of it"
    bridge=$(dirname "$(find "$work/bridge" -type d -name stages | head -n 1)")
  fi
  settle "$bridge" "$scene" stages/bridge_table_1_v1.glb
fi

folder=$(cd "$folder" && pwd)
echo "the assets are in $folder"
[[ $folder -ef $own ]] || echo "tell rlinf and ManiSkill where:  export MANISKILL_ASSET_DIR=$folder MS_ASSET_DIR=$folder"
