#!/usr/bin/env bash
# Start a script on the Ascend devices of this host, or of several.
#
#   platform/torch_npu/launch.sh NPROC script.py [argument ...]        NPROC ranks, one device each, on this host
#   platform/torch_npu/launch.sh NPROC -m module [argument ...]        a module, such as hyper_parallel.check
#
# Several hosts: the same command on each, with
#   NNODES        number of hosts
#   NODE_RANK     0 .. NNODES - 1, this host's place
#   MASTER_ADDR   address of host 0
#   MASTER_PORT   a free port on host 0 (default 29500)
#
# PYTHON names the interpreter (default: python). What the devices need in the environment is in environment.sh.
set -euo pipefail

if [[ $# -lt 2 ]]; then
    sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0" >&2
    exit 2
fi
here="$(cd "$(dirname "$0")" && pwd)"
# shellcheck source=environment.sh
source "$here/environment.sh"
exec "$here/../torch/launch.sh" "$@"
