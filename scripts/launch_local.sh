#!/usr/bin/env bash
# Runs a command as several processes of one cluster on this machine:
#
#   ./scripts/launch_local.sh 2 longtrain train CONFIG [key=value …]
#
# They find each other through JAX's own variables, as anywhere else. SIGTERM, SIGUSR1 and SIGINT go on to all of them.
# When one has failed, the others get GRACE seconds (default 180) to end by themselves. The exit code is that of the
# first process to fail, 0 when none does. Of the output, process 0's is shown as it is, the others' with their number.
set -euo pipefail

if [[ ! "${1:-}" =~ ^[1-9][0-9]*$ ]] || (($# < 2)); then
  echo "usage: $0 PROCESSES COMMAND [ARGUMENT …]" >&2
  exit 2
fi
processes="$1"
shift

export JAX_NUM_PROCESSES="$processes"
port="$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')"
export JAX_COORDINATOR_ADDRESS="127.0.0.1:$port"

pids=()
for ((process = 0; process < processes; process++)); do
  if ((process == 0)); then
    JAX_PROCESS_ID=0 "$@" &
  else
    JAX_PROCESS_ID="$process" "$@" > >(sed -u "s/^/[$process] /") 2> >(sed -u "s/^/[$process] /" >&2) &
  fi
  pids+=($!)
done

pass_on() { # a background process ignores Ctrl-C, which a terminal sends to all: it is told like the others
  local signal="$1"
  [[ "$signal" == INT ]] && signal=TERM
  kill -s "$signal" "${pids[@]}" 2>/dev/null || true
}
for signal in TERM USR1 INT; do
  # shellcheck disable=SC2064  # the signal's name now, not when it comes
  trap "pass_on $signal" "$signal"
done

first_failure=0
left=("${pids[@]}")
while ((${#left[@]})); do
  status=0
  wait -n -p ended "${left[@]}" || status=$?
  [[ -n "${ended:-}" ]] || continue # a trap ran, no process has ended
  still=()
  for pid in "${left[@]}"; do [[ "$pid" == "$ended" ]] || still+=("$pid"); done
  left=("${still[@]}")
  if ((status && !first_failure)); then
    first_failure="$status"
    if ((${#left[@]})); then
      # Its own output, or who reads ours would wait for the end of its sleep.
      (sleep "${GRACE:-180}" && kill -KILL "${left[@]}") >/dev/null 2>&1 &
      killer=$!
    fi
  fi
  unset ended
done
if [[ -n "${killer:-}" ]]; then kill "$killer" 2>/dev/null || true; fi
exit "$first_failure"
