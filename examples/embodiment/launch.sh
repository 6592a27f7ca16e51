#!/usr/bin/env bash
# Shared by run_embodiment.sh and eval_embodiment.sh: launch.sh train|eval [CONFIG] [ROBOT_PLATFORM] [key=value ...]
set -euo pipefail

command=$1
shift
EMBODIED_PATH="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
REPO_PATH="$(dirname "$(dirname "$EMBODIED_PATH")")"
export EMBODIED_PATH REPO_PATH

config=${CONFIG_NAME:-metaworld_50_ppo_openpi}
if [[ $# -gt 0 && $1 != *=* ]]; then config=$1 && shift; fi
if [[ $# -gt 0 && $1 != *=* && $1 != "~"* && $1 != -* ]]; then export ROBOT_PLATFORM=$1 && shift; fi # RoboTwin checks it

name=$(basename "$config" .yaml)
log_dir=${LOG_DIR:-$REPO_PATH/logs/$(date +%Y%m%d-%H%M%S)-$name}
settings=("runner.logger.log_path=$log_dir")
if [[ $command == train ]]; then settings+=("runner.logger.table_interval=1"); fi # for what reads the log file
if [[ -n ${STEPS:-} && $STEPS != -2 ]]; then settings+=("runner.max_steps=$STEPS"); fi
if [[ -n ${SAVE_INTER:-} && $SAVE_INTER != -2 ]]; then settings+=("runner.save_interval=$SAVE_INTER"); fi
if [[ -n ${NODES:-} && $NODES != -2 ]]; then settings+=("cluster.num_nodes=$NODES"); fi

# The environment that is active, else the one that make and install.sh make, else whatever is on PATH.
rlinf=${VIRTUAL_ENV:-$REPO_PATH/.venv}/bin/rlinf
[[ -x $rlinf ]] || rlinf=$REPO_PATH/.venv/bin/rlinf
[[ -x $rlinf ]] || rlinf=rlinf
log_file=run_embodiment.log
[[ $command == eval ]] && log_file=eval_embodiment.log

mkdir -p "$log_dir"
echo "$rlinf $command $config ${settings[*]} $*"
"$rlinf" "$command" "$config" "${settings[@]}" "$@" 2>&1 | tee -a "$log_dir/$log_file"
