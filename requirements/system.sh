#!/usr/bin/env bash
# The system libraries that headless rendering needs. Installs them as root; otherwise prints the exact line and stops.
set -euo pipefail
packages=()
# ldconfig is not on everyone's PATH, and its list is read whole: a pipe closed early would count as "missing"
libraries=$(PATH="$PATH:/usr/sbin:/sbin" ldconfig -p 2>/dev/null || true)
has() { [[ $libraries == *"$1"* ]]; }
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
