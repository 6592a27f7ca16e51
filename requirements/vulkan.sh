#!/usr/bin/env bash
# The Vulkan driver that ManiSkill and RoboTwin draw with on a machine without a GPU: bash requirements/vulkan.sh [VENV]
# SAPIEN refuses Mesa's lavapipe before 24.3. Where the distribution's Mesa is older, the driver of its backports is put
# into VENV/vulkan and the system keeps what it has; VENV/vulkan/lvp_icd.json names the driver to use either way.
# A machine with an NVIDIA driver needs none of this; VULKAN=software asks for it all the same.
# Never stops an installation: what it cannot do itself it prints as lines to run.
set -euo pipefail

package=mesa-vulkan-drivers
least=24.3
nvidia=/proc/driver/nvidia/version # there while NVIDIA's driver runs
etc=/etc

say() { echo "vulkan.sh: $1" >&2; }

# The archive that apt already uses, as a source of another suite: $1 the release, $2 the suite, then apt's files.
# The first entry that serves the release is copied whole, so that mirror, key and options stay those of this machine.
source_of_suite() {
  local release=$1 suite=$2 file entry
  shift 2
  for file in "$@"; do
    [[ -f $file ]] || continue
    if [[ $file == *.sources ]]; then
      entry=$(awk -v release="$release" -v suite="$suite" -v RS= '
        /(^|\n)Enabled:[ \t]*no/ || $0 !~ /(^|\n)Types:[^\n]*deb([ \t\n]|$)/ { next }
        {
          count = split($0, lines, "\n"); found = 0; text = ""
          for (i = 1; i <= count; i++) {
            if (lines[i] ~ /^#/) continue
            if (lines[i] ~ /^Suites:/) {
              words = split(lines[i], word, /[ \t]+/)
              for (w = 2; w <= words; w++) if (word[w] == release) found = 1
              lines[i] = "Suites: " suite
            }
            if (lines[i] ~ /^Types:/) lines[i] = "Types: deb"
            text = text lines[i] "\n"
          }
          if (found) { printf "%s", text; exit }
        }' "$file")
    else
      entry=$(awk -v release="$release" -v suite="$suite" '
        $1 == "deb" && !/cdrom:/ {
          at = 2
          if ($2 ~ /^\[/) { while ($at !~ /\]$/) at++; at++ } # options in brackets
          if ($(at + 1) == release) { $(at + 1) = suite; print; exit }
        }' "$file")
    fi
    if [[ -n $entry ]]; then echo "$entry" && return; fi
  done
}

# True when version $1 is at least $2.
at_least() { [[ $(printf '%s\n%s\n' "$2" "$1" | sort -V | head -n 1) == "$2" ]]; }

# The version of the installed package without its epoch, or nothing.
installed_version() {
  dpkg-query -W -f '${db:Status-Status} ${Version}' $package 2>/dev/null | sed -n 's/^installed \([0-9]*:\)\?//p'
}

# Put the driver of the backports into the folder. Needs no root: apt's lists and cache are private to this call.
unpack_backport() {
  local work=$1 release suite list apt
  release=$(. "$etc/os-release" && echo "${VERSION_CODENAME:-}")
  suite=$release-backports
  mkdir -p "$work/lists/partial" "$work/cache/archives/partial" "$work/tree"
  list=$work/private.list
  source_of_suite "$release" "$suite" "$etc"/apt/sources.list "$etc"/apt/sources.list.d/*.{sources,list} >"$list"
  [[ -s $list ]] || { say "apt has no source of ${release:-this release}" && return 1; }
  if grep -q '^Types:' "$list"; then mv "$list" "$work/private.sources" && list=$work/private.sources; fi
  apt=(apt-get -qq -o "Dir::Etc::sourcelist=$list" -o Dir::Etc::sourceparts=- -o "Dir::State::lists=$work/lists"
    -o "Dir::Cache=$work/cache" -o "APT::Sandbox::User=$(id -un)" -o Acquire::Languages=none)
  "${apt[@]}" update || return 1
  (cd "$work" && "${apt[@]}" download "$package/$suite") || return 1
  at_least "$(dpkg-deb -f "$work"/*.deb Version)" $least || { say "$suite is no newer" && return 1; }
  dpkg-deb -x "$work"/*.deb "$work/tree"
  mkdir -p "$folder"
  find "$work/tree" -name libvulkan_lvp.so -exec mv {} "$folder/" \;
}

# Name driver $1 in the file that Vulkan's loader reads; written last and in one move, it stands for finished work.
write_icd() {
  mkdir -p "$folder"
  printf '{"ICD": {"api_version": "1.4.0", "library_path": "%s"}, "file_format_version": "1.0.1"}\n' "$1" >"$icd.part"
  mv "$icd.part" "$icd"
}

# Say why there is no driver and what a person can do about it: $1 the reason, $2... the lines.
give_up() {
  say "$1, so ManiSkill and RoboTwin cannot draw on this machine's CPU (everything else works)"
  shift
  printf 'vulkan.sh:   %s\n' "$@" "bash requirements/vulkan.sh $venv" >&2
  exit 0
}

main() {
  local driver work install="apt-get install -y --no-install-recommends libvulkan1 $package"
  local newer="VK_ICD_FILENAMES=FILE names the ICD file of a newer Mesa from elsewhere (Debian 13 has one), or:"
  venv=${1:-.venv}
  mkdir -p "$venv"
  folder=$(cd "$venv" && pwd)/vulkan icd=$folder/lvp_icd.json
  if [[ -e $nvidia && ${VULKAN:-} != software ]]; then exit 0; fi
  if [[ -f $icd && -f $(sed 's/.*"library_path": "\([^"]*\)".*/\1/' "$icd") ]]; then exit 0; fi

  command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null || give_up "there is no apt here" "$newer"
  # The distribution's own package brings the loader and the libraries that any lavapipe is linked with.
  if [[ -z $(installed_version) ]]; then
    [[ $(id -u) -eq 0 ]] || give_up "$package is missing" "sudo $install"
    apt-get update -qq || true
    DEBIAN_FRONTEND=noninteractive DEBCONF_NOWARNINGS=yes $install -qq -o DPkg::Lock::Timeout=300 >/dev/null ||
      give_up "apt cannot install $package" "sudo $install"
  fi
  driver=/usr/lib/$(uname -m)-linux-gnu/libvulkan_lvp.so
  if ! at_least "$(installed_version)" $least || [[ ! -f $driver ]]; then
    say "Mesa $(installed_version) is older than $least; taking the driver of the backports"
    work=$(mktemp -d)
    # shellcheck disable=SC2064 # the folder of now: the variable is gone when the trap runs
    trap "rm -rf '$work'" EXIT
    unpack_backport "$work" || give_up "the backports of this release bring no Mesa $least" "$newer"
    driver=$folder/libvulkan_lvp.so
  fi
  [[ -f $driver ]] || give_up "$package holds no lavapipe" "$newer"
  if ldd "$driver" | grep -q 'not found'; then
    give_up "$driver lacks $(ldd "$driver" | awk '/not found/ { print $1 }' | paste -sd ' ')" "sudo $install"
  fi
  write_icd "$driver"
  say "ManiSkill draws with $driver"
  if [[ -e $nvidia ]]; then say "but only where you say so, since there is an NVIDIA driver:  export VK_ICD_FILENAMES=$icd"; fi
}

if [[ ${BASH_SOURCE[0]} == "$0" ]]; then main "$@"; fi
