#!/usr/bin/env bash
# Says what this machine lacks for running VTL, a sentence each, before minutes go into building it.
# What only the built programs can try, `vtl doctor` tries.
#
#   scripts/preflight.sh WHAT     WHAT needs it: "the demo", say; exit 1 if anything is missing
set -uo pipefail

what=${1:-VTL}
repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# GiB that a first build takes in the target directory, the toolchain, and cargo's registry.
needed=4
lacks=0

lack() {
    printf 'preflight: %s\n' "$1" >&2
    lacks=$((lacks + 1))
}

# The kernel's release is at least MAJOR.MINOR.
kernel_is() {
    local major minor
    IFS=.- read -r major minor _ <<<"$(uname -r)"
    [ "$major" -gt "$1" ] || { [ "$major" = "$1" ] && [ "${minor%%[^0-9]*}" -ge "$2" ]; }
}

# Free GiB where a path lies or will lie.
free_gib() {
    local path=$1
    until [ -d "$path" ]; do path=$(dirname "$path"); done
    df --output=avail -B1G "$path" | tail -n 1 | tr -d ' '
}

kernel_is 6 6 ||
    lack "Linux $(uname -r) is too old for VTL, which needs 6.6 or newer: boot a newer kernel (on Debian 12: linux-image-amd64 from bookworm-backports)"
[ -r /sys/kernel/btf/vmlinux ] || {
    if [ -d /sys/kernel ]; then
        lack "this kernel has no BTF (/sys/kernel/btf/vmlinux): use one built with CONFIG_DEBUG_INFO_BTF=y, as all distributions' are"
    else
        lack "/sys is not mounted: mount -t sysfs sysfs /sys"
    fi
}
if [ "$(id -u)" != 0 ]; then
    lack "$what needs root, to make network namespaces and load eBPF: run it with sudo"
else
    unshare --net true 2>/dev/null ||
        lack "network namespaces cannot be made here (a container without CAP_SYS_ADMIN, or a kernel without CONFIG_NET_NS): $what needs them"
    if [ ! -r /proc/self/mountinfo ]; then
        lack "/proc is not mounted: mount -t proc proc /proc"
    elif ! awk '$5 == "/" { found = 1 } END { exit !found }' /proc/self/mountinfo; then
        lack "/ is not a mount point here (a chroot?), so \`ip netns exec\` fails: before you enter it, mount --bind its directory onto itself"
    fi
fi
target=${CARGO_TARGET_DIR:-$repo/target}
if [ ! -x "$target/release/vtl" ] && [ "$(free_gib "$target")" -lt "$needed" ]; then
    lack "only $(free_gib "$target") GiB are free at $target, and a first build takes $needed: make room, or set CARGO_TARGET_DIR"
fi
[ "$lacks" = 0 ] || exit 1
