#!/usr/bin/env bash
# Runs a command as on a machine with less memory: see usage below, or scripts/memcap.sh --help.
set -euo pipefail

usage() {
  cat <<'EOF'
usage: scripts/memcap.sh LIMIT [--cold PATH]... [--report FILE] -- COMMAND [ARGUMENT]...

Runs COMMAND with at most LIMIT of memory, page cache included: a control group holds it there, and the kernel ends it
where it insists on more. Swap does not count as memory: there is none for COMMAND. File pages that are in the page cache
already belong to whoever read them first and are not counted: shared libraries of other processes, and what --cold names
not.

  LIMIT          512M, 6G, 6GiB: powers of 1024
  --cold PATH    a file or folder that leaves the page cache first, so that reading it really reads the disk (under a
                 virtual machine the host may still cache it: compare only what ran in the same minutes)
  --report FILE  what was seen, as JSON: limit_bytes, peak_bytes (page cache included), reclaims (times the limit was
                 met), oom_kills, exit_code; the same goes to stderr in any case

Needs root and the memory controller of control groups, v1 or v2. Exit code: COMMAND's, or 125 with a reason on stderr
where it could not be run like this. What COMMAND leaves running is ended.
EOF
}
fail() { echo "memcap: $1" >&2; exit 125; }
put() { { echo "$1" >"$2"; } 2>/dev/null || fail "cannot write $1 to $2"; } # VALUE FILE

find_controller() { # sets version and root
  if [ -f /sys/fs/cgroup/memory/memory.limit_in_bytes ]; then version=1 root=/sys/fs/cgroup/memory; return; fi
  version=2
  for root in /sys/fs/cgroup /sys/fs/cgroup/unified; do
    grep -qw memory "$root/cgroup.controllers" 2>/dev/null || continue
    grep -qw memory "$root/cgroup.subtree_control" && return
    { echo +memory >"$root/cgroup.subtree_control"; } 2>/dev/null && return
    fail "the memory controller of $root cannot be handed on to a group"
  done
  fail "no memory controller of control groups (v1 or v2) under /sys/fs/cgroup"
}

drop_cache() { # PATH: written back, then dropped; dd with count=0 moves no data
  [ -e "$1" ] || fail "--cold $1: not there"
  find -L "$1" -type f -exec sync {} + -exec sh -c 'for f; do dd if="$f" iflag=nocache count=0 status=none; done' sh {} +
}

make_group() { # sets group, with its limit
  group=$root/h2o_flexgen_memcap_$$
  { mkdir "$group"; } 2>/dev/null || fail "cannot make a control group in $root"
  trap remove_group EXIT
  if [ $version = 1 ]; then
    put "$limit" "$group/memory.limit_in_bytes"
    [ ! -f "$group/memory.memsw.limit_in_bytes" ] || put "$limit" "$group/memory.memsw.limit_in_bytes"
  else
    put "$limit" "$group/memory.max"
    [ ! -f "$group/memory.swap.max" ] || put 0 "$group/memory.swap.max"
  fi
}

remove_group() {
  local pid
  while read -r pid; do kill -KILL "$pid" 2>/dev/null || true; done <"$group/cgroup.procs"
  for _ in $(seq 50); do rmdir "$group" 2>/dev/null && return; sleep 0.1; done
  echo "memcap: $group is still there" >&2
}

run() { # COMMAND...: in the group from its first instruction; sets code
  set -m # a process group of its own, so that signals can be passed on to all of it
  bash -c 'echo $$ >"$1" || exit 125; shift; exec "$@"' memcap "$group/cgroup.procs" "$@" <&0 &
  local child=$!
  set +m
  local signalled=yes
  trap 'signalled=yes; kill -INT -- -$child || true' INT
  trap 'signalled=yes; kill -TERM -- -$child || true' TERM
  while [ $signalled = yes ]; do # a signal ends the wait, not always the command
    signalled=no code=0
    wait $child || code=$?
  done
}

counter() { awk -v name="$2" '$1 == name { print $2 }' "$group/$1"; } # FILE NAME

report() { # LIMIT as typed
  local peak reclaims kills
  if [ $version = 1 ]; then
    peak=$(cat "$group/memory.max_usage_in_bytes")
    reclaims=$(cat "$group/memory.failcnt" "$group/memory.memsw.failcnt" 2>/dev/null | awk '{ n += $1 } END { print n }')
    kills=$(counter memory.oom_control oom_kill)
  else
    peak=$(cat "$group/memory.peak" 2>/dev/null || echo null) reclaims=$(counter memory.events max)
    kills=$(counter memory.events oom_kill)
  fi
  echo "memcap: peak $peak of $limit bytes, page cache included; limit met $reclaims times, ${kills:-0} killed" >&2
  [ "${kills:-0}" = 0 ] || echo "memcap: the command wanted more than $1, and the kernel ended it" >&2
  [ -z "$report_file" ] || printf '{"limit_bytes": %s, "peak_bytes": %s, "reclaims": %s, "oom_kills": %s, "exit_code": %s}\n' \
    "$limit" "$peak" "$reclaims" "${kills:-0}" "$code" >"$report_file"
}

case ${1:-} in -h | --help) usage; exit 0 ;; '') usage >&2; exit 125 ;; esac
[[ $1 =~ ^[0-9]+([KMGT])(iB)?$ ]] || fail "LIMIT is '$1'; needed a number with a unit: 512M, 6G, 6GiB"
size=$1 limit=$(numfmt --from=iec "${1%iB}")
shift
cold=() report_file=
while [ $# -gt 0 ] && [ "$1" != -- ]; do
  case $1 in
    --cold) cold+=("${2:?--cold needs a path}"); shift 2 ;;
    --report) report_file=${2:?--report needs a file}; shift 2 ;;
    *) fail "unknown argument $1; COMMAND comes after --" ;;
  esac
done
[ $# -gt 1 ] || fail "no command after --"
shift
[ "$(id -u)" = 0 ] || fail "needs root, to make a control group"
find_controller
for path in "${cold[@]}"; do drop_cache "$path"; done
make_group
run "$@"
report "$size"
exit "$code"
