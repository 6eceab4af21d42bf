#!/usr/bin/env bash
# Start a script on torch ranks, on this host or on several.
#
#   platform/torch/launch.sh NPROC script.py [argument ...]            NPROC ranks, all on this host
#   platform/torch/launch.sh NPROC -m module [argument ...]            a module, such as hyper_parallel.check
#
# Several hosts: the same command on each, with
#   NNODES        number of hosts
#   NODE_RANK     0 .. NNODES - 1, this host's place
#   MASTER_ADDR   address of host 0
#   MASTER_PORT   a free port on host 0 (default 29500)
#
# PYTHON names the interpreter (default: python).
set -euo pipefail

if [[ $# -lt 2 ]]; then
    sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0" >&2
    exit 2
fi
nproc=$1
shift

# CPU ranks share the cores of their host: without this each takes all of them.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

arguments=(--nproc-per-node "$nproc")
if [[ "${NNODES:-1}" -gt 1 ]]; then
    arguments+=(--nnodes "$NNODES" --node-rank "${NODE_RANK:?is this host number 0, 1, ...?}"
                --master-addr "${MASTER_ADDR:?is the address of host 0}" --master-port "${MASTER_PORT:-29500}")
else
    arguments+=(--standalone)  # picks a free port
fi
exec "${PYTHON:-python}" -m torch.distributed.run "${arguments[@]}" "$@"
