#!/usr/bin/env bash
# Runs a command as several processes of one cluster on this machine:
#
#   ./scripts/launch_local.sh 2 longtrain train CONFIG [key=value …]
#
# They find each other through JAX's own variables, as anywhere else, and each sees one of the machine's GPUs. As one of
# several nodes (scripts/kubernetes/gpu.yaml): NODES and NODE, from 0, with JAX_COORDINATOR_ADDRESS, process 0's, in the
# environment, and the same PROCESSES on every node. SIGTERM, SIGUSR1 and SIGINT go on to all of them.
# When one has failed, the others get GRACE seconds (default 180) to end by themselves. The exit code is that of the
# first process to fail, 0 when none does. Of the output, the first process's is shown as it is, the others' with their
# number.
set -euo pipefail

if [[ ! "${1:-}" =~ ^[1-9][0-9]*$ ]] || (($# < 2)); then
  echo "usage: $0 PROCESSES COMMAND [ARGUMENT …]" >&2
  exit 2
fi
processes="$1"
shift

nodes="${NODES:-1}" node="${NODE:-0}"
if [[ ! "$nodes" =~ ^[1-9][0-9]*$ || ! "$node" =~ ^[0-9]+$ ]] || ((node >= nodes)); then
  echo "$0: NODES = $nodes, NODE = $node: must be whole numbers, NODE less than NODES" >&2
  exit 2
fi
if ((nodes > 1)) && [[ -z "${JAX_COORDINATOR_ADDRESS:-}" ]]; then
  echo "$0: NODES = $nodes, but JAX_COORDINATOR_ADDRESS, where process 0 is found, is not set" >&2
  exit 2
fi
if ((nodes == 1)); then
  port="$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')"
  export JAX_COORDINATOR_ADDRESS="127.0.0.1:$port"
fi
export JAX_NUM_PROCESSES="$((nodes * processes))"

pids=()
for ((place = 0; place < processes; place++)); do
  export JAX_PROCESS_ID="$((node * processes + place))" JAX_LOCAL_DEVICE_IDS="$place"
  if ((place == 0)); then
    "$@" &
  else
    "$@" > >(sed -u "s/^/[$JAX_PROCESS_ID] /") 2> >(sed -u "s/^/[$JAX_PROCESS_ID] /" >&2) &
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
