#!/usr/bin/env bash
# Evaluate: eval_embodiment.sh [CONFIG] [ROBOT_PLATFORM] [key=value ...]; the same YAML as for training.
# Writes to logs/<time>-<config>. Environment as in run_embodiment.sh.
set -euo pipefail
exec "$(dirname "${BASH_SOURCE[0]}")/launch.sh" eval "$@"
