#!/bin/sh
# Puts promtool and pgbouncer below .cache/tools, from Debian's packages and without installing anything.
# Where there is no apt-get, or no network, the tests that need them are skipped and say so.
set -eu
folder=$(cd "$(dirname "$0")/../.." && pwd)/.cache/tools

fetch() {
  program=$1
  shift
  if command -v "$program" >/dev/null 2>&1 || [ -x "/usr/sbin/$program" ]; then return; fi
  if [ -x "$folder/usr/bin/$program" ] || [ -x "$folder/usr/sbin/$program" ]; then return; fi
  if ! command -v apt-get >/dev/null 2>&1; then
    echo "no $program, and no apt-get to fetch it with" >&2
    return
  fi
  mkdir -p "$folder/packages"
  (
    cd "$folder/packages"
    apt-get download --quiet --quiet "$@" 2>/dev/null || { apt-get update --quiet --quiet && apt-get download --quiet --quiet "$@"; }
    for package in "$@"; do
      dpkg -x "$package"_*.deb "$folder"
    done
  ) >/dev/null 2>&1 || echo "could not fetch $program" >&2
}

fetch promtool prometheus
fetch pgbouncer pgbouncer libc-ares2 libevent-2.1-7
