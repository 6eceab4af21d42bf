#!/usr/bin/env bash
# Start a script on MindSpore ranks, on CPU or Ascend devices, on this host or on several.
#
#   platform/mindspore/launch.sh NPROC script.py [argument ...]        NPROC ranks, all on this host
#   platform/mindspore/launch.sh NPROC -m module [argument ...]        a module, such as hyper_parallel.check
#
# Several hosts: the same command on each, with
#   NNODES        number of hosts, each with NPROC ranks
#   NODE_RANK     0 .. NNODES - 1, this host's place
#   MASTER_ADDR   address of host 0, which also runs the scheduler
#   MASTER_PORT   a free port on host 0 (default 8118)
#
# PYTHON names the interpreter (default: python). LOG_DIR keeps what each rank printed (default: rank_log).
# Time limits and what devices need in the environment are in environment.sh.
set -euo pipefail

if [[ $# -lt 2 ]]; then
    sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0" >&2
    exit 2
fi
nproc=$1
shift
python="$(command -v "${PYTHON:-python}")"

# msrun starts the ranks with the first "python" on PATH.
PATH="$(dirname "$python"):$PATH"
export PATH
# shellcheck source=environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

nnodes="${NNODES:-1}"
arguments=(--worker_num $((nnodes * nproc)) --local_worker_num "$nproc" --join True --log_dir "${LOG_DIR:-rank_log}")
if [[ "$nnodes" -gt 1 ]]; then
    arguments+=(--node_rank "${NODE_RANK:?is this host number 0, 1, ...?}"
                --master_addr "${MASTER_ADDR:?is the address of host 0}" --master_port "${MASTER_PORT:-8118}")
else
    free_port='import socket; probe = socket.socket(); probe.bind(("127.0.0.1", 0)); print(probe.getsockname()[1])'
    arguments+=(--master_addr 127.0.0.1 --master_port "${MASTER_PORT:-$("$python" -c "$free_port")}")
fi

# msrun takes a script, or python with its arguments.
[[ "$1" == -m ]] && set -- python "$@"
# Two notices of MindSpore per rank at its end, which GLOG_v does not silence, are left out.
"$python" -m mindspore.parallel.cluster.run "${arguments[@]}" "$@" \
    > >(grep --line-buffered -v 'Event base dispatch success') 2>&1 &
# msrun ends its ranks when it is interrupted, but leaves them running when it is terminated.
trap 'kill -INT $!' TERM
wait $!
