# What an Ascend host needs in its environment; launch.sh reads this file, and so may any other shell: source it.
# A variable that is set already keeps its value. What is commented out is for the case that its comment describes.

# CANN: its script sets ASCEND_HOME_PATH and the paths of its libraries. Newer versions install to the first place.
if [[ -z "${ASCEND_HOME_PATH:-}" ]]; then
    for script in /usr/local/Ascend/cann/set_env.sh /usr/local/Ascend/ascend-toolkit/set_env.sh; do
        if [[ -f "$script" ]]; then
            # The script reads variables that need not be set.
            case $- in *u*) nounset=-u ;; *) nounset=+u ;; esac
            set +u
            # shellcheck disable=SC1090
            source "$script"
            set "$nounset"
            break
        fi
    done
    unset script nounset
fi

# Which of the host's devices are used, as a list of numbers. All, unless set.
# export ASCEND_RT_VISIBLE_DEVICES=0,1,2,3

# Time limits of HCCL, in seconds.
# Setting up the links of a group: how long ranks wait for ranks that come later (120 to 7200; HCCL's default is 120,
# to which it adds 20 to tell the ranks why). Hosts that read a checkpoint first need more. Error EI0006 is this limit.
export HCCL_CONNECT_TIMEOUT="${HCCL_CONNECT_TIMEOUT:-300}"
# One operation: how long ranks wait for the others in it (HCCL's default is 1836; 0 means for ever; at most 1091 where
# HCCL_OP_EXPANSION_MODE is AIV). Error EI0002 is this limit. Not less than HCCL_CONNECT_TIMEOUT: links that cannot be
# set up would be reported as an operation that takes too long.
export HCCL_EXEC_TIMEOUT="${HCCL_EXEC_TIMEOUT:-1836}"

# Memory of HCCL: twice this many MB for every group of ranks (its default). ETP makes a group per mesh axis, beside
# the one of all ranks. Messages larger than this are slower.
export HCCL_BUFFSIZE="${HCCL_BUFFSIZE:-200}"

# Several hosts: the network interface by which ranks find each other, where the first by name is the wrong one.
# HCCL_IF_IP, an address, goes before it. torchrun and gloo have a variable of their own.
# export HCCL_SOCKET_IFNAME=eth0
# export GLOO_SOCKET_IFNAME=eth0

# HCCL listens on 16 ports of the host from this one on (its default is 60000). Keep them free of other programs:
# sysctl -w net.ipv4.ip_local_reserved_ports=60000-60015
# export HCCL_IF_BASE_PORT=60000

# Where CANN and HCCL write their logs (default: ~/ascend/log).
# export ASCEND_PROCESS_LOG_PATH=ascend_log

# Each operator ends before the next is started: slow, but an error is raised where it happens.
# export ASCEND_LAUNCH_BLOCKING=1
