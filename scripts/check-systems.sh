#!/usr/bin/env bash
# Runs the README's commands on bare systems, each made by debootstrap below target/systems: what a
# newcomer meets. The kernel is this machine's. As root; wants debootstrap, and the network.
#
#   scripts/check-systems.sh [SYSTEM...]     all of them, or debian12, debian13, ubuntu24.04
#
# COMMANDS="make demo:make test" is what runs, in that order; KEEP=1 leaves the systems there.
# What is committed is checked, nothing else. Output goes to target/systems/SYSTEM.log.
set -euo pipefail

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
systems=$repo/target/systems
COMMANDS=${COMMANDS:-make demo:make test}
mirror_debian=http://deb.debian.org/debian
mirror_ubuntu=http://archive.ubuntu.com/ubuntu

fail() {
    printf 'check-systems: %s\n' "$1" >&2
    exit 1
}

# Usage: timed LOG LABEL COMMAND...; appends its output to the log, and prints how long it took.
timed() {
    local log=$1 label=$2 begin=$SECONDS status=0
    shift 2
    printf '  %-14s' "$label"
    printf '\n==== %s\n' "$label" >>"$log"
    "$@" </dev/null >>"$log" 2>&1 || status=$?
    printf '%3d:%02d  %s\n' $(((SECONDS - begin) / 60)) $(((SECONDS - begin) % 60)) \
        "$([ $status = 0 ] && echo ok || echo "FAILED ($status)")"
    return $status
}

bootstrap() {
    local system=$1 root=$2 keys
    case $system in
    debian12) debootstrap --variant=minbase bookworm "$root" $mirror_debian ;;
    debian13) debootstrap --variant=minbase trixie "$root" $mirror_debian ;;
    ubuntu24.04)
        keys=$("$repo/scripts/ubuntu-keys.sh" "$systems/keys") || return 1
        debootstrap --variant=minbase --components=main,universe --keyring="$keys" \
            noble "$root" $mirror_ubuntu /usr/share/debootstrap/scripts/gutsy || return 1
        echo "deb $mirror_ubuntu noble-updates main universe" >>"$root/etc/apt/sources.list"
        ;;
    esac
}

# What an installed system has by itself: the network's names, and whom this machine trusts.
furnish() {
    local root=$1
    cp --dereference /etc/resolv.conf "$root/etc/resolv.conf"
    mkdir -p "$root/usr/local/share/ca-certificates"
    cp /etc/ssl/certs/ca-certificates.crt "$root/usr/local/share/ca-certificates/host.crt"
    git clone --quiet --no-hardlinks "$repo" "$root/root/vtl"
}

# Usage: within ROOT COMMAND; in mounts of its own, which are gone with it.
within() {
    unshare --mount --propagation private bash -ec '
        mount --bind "$1" "$1"
        mount -t proc proc "$1/proc"
        mount --rbind /sys "$1/sys"
        mount --rbind /dev "$1/dev"
        mount -t tmpfs tmpfs "$1/run"
        exec chroot "$1" /usr/bin/env -i HOME=/root TERM=dumb CI=1 \
            PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
            bash -c "cd /root && if [ -d vtl ]; then cd vtl; fi && $2"
    ' within "$1" "$2"
}

# Ends what still runs in a system: a command that was interrupted leaves it.
end_processes() {
    local process
    for process in /proc/[0-9]*; do
        [[ $(readlink "$process/root" || true) == "$1"* ]] || continue
        kill -9 "${process#/proc/}" 2>/dev/null || true
    done
}

check() {
    local system=$1 root=$systems/$1 log=$systems/$1.log command left
    printf '%s\n' "$system"
    end_processes "$root"
    rm -rf --one-file-system "$root"
    : >"$log"
    timed "$log" debootstrap bootstrap "$system" "$root" &&
        furnish "$root" &&
        timed "$log" 'make, git' within "$root" \
            'apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends make git' ||
        return 1
    IFS=: read -ra commands <<<"$COMMANDS"
    for command in "${commands[@]}"; do
        timed "$log" "$command" within "$root" "$command" || {
            tail -n 40 "$log"
            return 1
        }
    done
    for left in /proc/[0-9]*/root; do
        if [[ $(readlink "$left" 2>/dev/null) == "$root"* ]]; then
            printf '  left running: %s\n' "$(tr '\0' ' ' <"${left%root}cmdline")"
            return 1
        fi
    done
    [ -n "${KEEP:-}" ] || rm -rf --one-file-system "$root"
}

[ "$(id -u)" = 0 ] || fail "needs root, to make systems and enter them: run it with sudo"
command -v debootstrap >/dev/null || fail "needs debootstrap: apt install debootstrap"
[ $# -gt 0 ] || set -- debian12 debian13 ubuntu24.04
for system in "$@"; do
    [[ " debian12 debian13 ubuntu24.04 " == *" $system "* ]] ||
        fail "there is no system '$system': take debian12, debian13 or ubuntu24.04"
done
mkdir -p "$systems"
trap 'for system in "$@"; do end_processes "$systems/$system"; done; rm -rf "$systems/keys"' EXIT
failed=()
for system in "$@"; do
    check "$system" || failed+=("$system")
done
[ ${#failed[@]} = 0 ] || fail "${failed[*]}: see target/systems/*.log"
