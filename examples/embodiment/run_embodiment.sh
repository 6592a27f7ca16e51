#!/usr/bin/env bash
# Train: run_embodiment.sh [CONFIG] [ROBOT_PLATFORM] [key=value ...]
# Writes to logs/<time>-<config>. Environment: STEPS, SAVE_INTER and NODES set runner.max_steps, runner.save_interval and
# cluster.num_nodes; LOG_DIR another log folder.
set -euo pipefail
exec "$(dirname "${BASH_SOURCE[0]}")/launch.sh" train "$@"
