#!/bin/sh
# Guest script of the bench, for all sides of the comparisons with swap and post-copy:
#   swap-guest ours BYTES SEED
#   swap-guest swap BYTES SEED SERVER PORT READ_AHEAD
#   swap-guest postcopy BYTES SEED
# The swap side first attaches swap on a network block device. READ_AHEAD is a number for
# vm.page-cluster, or "default" for the kernel's own. The post-copy side has no network card, waits
# for a line of the console before the visits, and runs until its host ends it. Prints lines
# "BENCH KEY VALUE" around faultprobe's line, and "BENCH failed WHY" when something is missing.
export PATH=/usr/local/bin:$PATH
side=$1 bytes=$2 seed=$3

fail() {
    echo "BENCH failed $*"
    exit 1
}

# Fails if the line is absent: a guest without it cannot be compared.
print_value() { # FILE KEY NAME
    value=$(sed -n "s/^$2[: ] *\([0-9]*\).*/\1/p" "$1")
    [ -n "$value" ] || fail "no $2 in $1"
    echo "BENCH $3 $value"
}

work() { # further arguments of faultprobe
    # Caches that init and this script filled must not count as the program's memory.
    sync
    echo 3 >/proc/sys/vm/drop_caches
    print_value /proc/meminfo MemTotal total_kib
    print_value /proc/meminfo MemAvailable available_kib
    print_value /proc/meminfo SwapFree swap_kib
    print_value /proc/vmstat pswpin swapped_in_before
    faultprobe --bytes "$bytes" --seed "$seed" "$@" || fail "faultprobe ended with $?"
    print_value /proc/vmstat pswpin swapped_in_after
}

# Kernel messages would interleave with the output of this script.
dmesg -n 1
if [ "$side" = postcopy ]; then
    work --pause
    echo "BENCH done 1"
    read -r _
    exit 0
fi
[ "$(cat /sys/class/net/eth0/address)" ] || fail "no network card"
ip addr add 192.168.77.2/24 dev eth0 && ip link set eth0 mtu 9000 up || fail "the network card cannot be used"
ip route add default via 192.168.77.1 || fail "no route"
if [ "$side" = ours ]; then
    work
    exit 0
fi
server=$4 port=$5 read_ahead=$6
ip link set lo up
timeout 60 nbd-client "$server" "$port" /dev/nbd0 -N '' -b 4096 -swap || fail "nbd-client ended with $?"
mkswap /dev/nbd0 || fail "mkswap ended with $?"
swapon /dev/nbd0 || fail "swapon ended with $?"
grep -q nbd0 /proc/swaps || fail "the device is not used for swap"
[ "$read_ahead" = default ] || echo "$read_ahead" >/proc/sys/vm/page-cluster || fail "read-ahead $read_ahead is refused"
echo "BENCH page_cluster $(cat /proc/sys/vm/page-cluster)"
work
