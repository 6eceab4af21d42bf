# What MindSpore ranks need in their environment; launch.sh reads this file, and so may any other shell: source it.
# A variable that is set already keeps its value. What is commented out is for the case that its comment describes.

# Ranks share the cores of their host: without this each takes all of them.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# Seconds until the scheduler gives up a rank that ended without a word, or that a busy host kept silent.
export MS_NODE_TIMEOUT="${MS_NODE_TIMEOUT:-30}"
# A second between attempts to reach the scheduler. 0 does not work.
export MS_RETRY_INTERVAL_LOWER="${MS_RETRY_INTERVAL_LOWER:-1}" MS_RETRY_INTERVAL_UPPER="${MS_RETRY_INTERVAL_UPPER:-1}"
# MindSpore's own log: critical errors only; 3 adds errors, 2 warnings.
export GLOG_v="${GLOG_v:-4}"

# CPU ranks: seconds a rank waits in one operation for the others; MindSpore's 30 are short for ranks that share cores.
export MS_CPU_COMM_OP_TIMEOUT="${MS_CPU_COMM_OP_TIMEOUT:-120}"

# Ascend devices: CANN, the time limits and memory of HCCL, and the network interface are the same for both frameworks.
# shellcheck source=../torch_npu/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/../torch_npu/environment.sh"
