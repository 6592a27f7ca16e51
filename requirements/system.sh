#!/usr/bin/env bash
# The system libraries that headless rendering needs. Installs them as root; otherwise prints the exact line and stops.
set -euo pipefail
packages=()
has() { ldconfig -p 2>/dev/null | grep -q "$1"; }
has libOSMesa.so || packages+=(libosmesa6)
has libEGL.so.1 || packages+=(libegl1)
has libGL.so.1 || packages+=(libgl1)
if [ ${#packages[@]} -eq 0 ]; then exit 0; fi
if ! command -v apt-get >/dev/null; then
  echo "missing system libraries; install the equivalents of: ${packages[*]}" >&2
  exit 1
fi
line="apt-get install -y --no-install-recommends ${packages[*]}"
if [ "$(id -u)" -ne 0 ]; then
  echo "missing system libraries; run:  sudo $line" >&2
  exit 1
fi
apt-get update -qq
DEBIAN_FRONTEND=noninteractive $line >/dev/null
