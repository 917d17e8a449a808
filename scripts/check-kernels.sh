#!/usr/bin/env bash
# Runs what loads eBPF under the kernels that the README's systems boot, in virtual machines which
# see this machine's files: a verifier of another version accepts other programs. By emulation, ten
# times slower than hardware, unless ACCEL=kvm is given. As root; wants the network.
#
#   scripts/check-kernels.sh [SYSTEM...]     all of them, or debian13, ubuntu24.04, ubuntu24.04-hwe
#
# Output goes to target/kernels/SYSTEM.log; a kernel stays in target/kernels/SYSTEM until you remove
# that. TESTS='programs load' are the tests of vtl-bpf, E2E='lossy__ pool__' end-to-end tests: none
# unless given.
set -euo pipefail

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$repo"
target=$(realpath -m "${CARGO_TARGET_DIR:-target}")
kernels=$target/kernels
TESTS=${TESTS:-load programs tcp udp}
E2E=${E2E:-}
virtme=virtme-ng==1.42

fail() {
    printf 'check-kernels: %s\n' "$1" >&2
    exit 1
}

# The kernel's package, with verified signatures, unpacked below $kernels/SYSTEM.
# Usage: get_kernel SYSTEM
get_kernel() {
    local system=$1 at=$kernels/$1 key=/usr/share/keyrings/debian-archive-keyring.gpg packages options
    local source="http://deb.debian.org/debian trixie main" generic=linux-image-amd64
    rm -rf "$at"
    mkdir -p "$at"/apt/{lists,cache/archives}/partial "$at/new"
    if [[ "$system" == ubuntu* ]]; then
        key=$(scripts/ubuntu-keys.sh "$at/keys")
        source="http://archive.ubuntu.com/ubuntu noble-updates main" generic=linux-image-generic
        [ "$system" = ubuntu24.04 ] || generic=linux-image-generic-hwe-24.04
    fi
    [ -e "$key" ] || fail "no keys of Debian here: apt install debian-archive-keyring"
    echo "deb [signed-by=$key] $source" >"$at/apt/sources.list"
    options=(-qq -o Dir::Etc::SourceList="$at/apt/sources.list" -o Dir::Etc::SourceParts=-
        -o Dir::State::Lists="$at/apt/lists" -o Dir::Cache="$at/apt/cache" -o Dir::State::Status=/dev/null
        -o APT::Sandbox::User=root -o Acquire::Languages=none)
    apt-get "${options[@]}" update
    packages=$(apt-cache "${options[@]}" depends $generic | sed -n 's/ *Depends: \(linux-image-[0-9].*\)/\1/p')
    [[ "$system" != ubuntu* ]] || packages="$packages ${packages/image/modules}"
    # shellcheck disable=SC2086 # one or two names
    (cd "$at" && apt-get "${options[@]}" download $packages)
    for package in "$at"/linux-*.deb; do dpkg-deb -x "$package" "$at/new"; done
    [ -e "$at/new/lib" ] || ln -s usr/lib "$at/new/lib"
    depmod -b "$at/new" "$(ls "$at/new/lib/modules")"
    rm -rf "$at/apt" "$at"/*.deb "$at/keys"
    mv "$at/new" "$at/root"
}

# Usage: boot SYSTEM SECONDS COMMAND; in a virtual machine that may write to $kernels/SYSTEM/out alone.
# What COMMAND prints is in $kernels/SYSTEM.log.
boot() {
    local at=$kernels/$1 seconds=$2 machine
    mkdir -p "$at/out"
    rm -f "$at/out/"*
    printf '%s\n' "exec >'$at/out/log' 2>&1" 'mount -t tmpfs tmpfs /run' 'ulimit -l unlimited' 'modprobe tcp_bbr' \
        "if ( $3 ); then echo 0 >'$at/out/status'; else echo 1 >'$at/out/status'; fi" >"$at/out/run.sh"
    timeout "$seconds" "$kernels/venv/bin/vng" --verbose --force-9p "${accel[@]}" --user root \
        --run "$at"/root/boot/vmlinuz-* --cpus 2 --memory 4G --cwd "$repo" \
        --overlay-rwdir "$repo" --overlay-rwdir "$target" --overlay-rwdir /var --overlay-rwdir /root \
        --overlay-rwdir /etc --rwdir "$at/out" -- "bash '$at/out/run.sh'" \
        </dev/null >"$at/console.log" 2>&1 &
    machine=$!
    trap 'kill $machine 2>/dev/null' TERM
    wait $machine || true
    cp "$at/out/log" "$kernels/$1.log" 2>/dev/null || cp "$at/console.log" "$kernels/$1.log"
    [ "$(cat "$at/out/status" 2>/dev/null)" = 0 ]
}

check() {
    local system=$1 begin=$SECONDS commands
    # Not in a condition, where bash would go on behind what fails.
    if [ ! -d "$kernels/$system/root" ]; then get_kernel "$system"; fi
    commands="uname -r && '$target/release/vtl' doctor && cd '$repo/crates/vtl-bpf'"
    for test in "${binaries[@]}"; do commands+=" && '$test' --test-threads=1"; done
    if [ -n "$E2E" ]; then
        # What was built is there: a build of it in the machine would take hours.
        commands+=" && cd '$repo/tests' && CARGO=/bin/true '$e2e' --test-threads=1 $E2E"
    fi
    if boot "$system" 3000 "$commands"; then
        printf '%-15s %s: passed in %d:%02d\n' "$system" "$(sed -n 1p "$kernels/$system.log")" \
            $(((SECONDS - begin) / 60)) $(((SECONDS - begin) % 60))
    else
        printf '%-15s FAILED: see %s\n' "$system" "$kernels/$system.log"
        return 1
    fi
}

[ "$(id -u)" = 0 ] || fail "needs root, to load eBPF: run it with sudo"
export PATH=$kernels/venv/bin:$PATH:/usr/sbin:/sbin
for need in qemu-system-x86_64 busybox depmod; do
    command -v $need >/dev/null ||
        fail "needs $need: apt install --no-install-recommends qemu-system-x86 busybox-static kmod python3-venv"
done
[ $# -gt 0 ] || set -- debian13 ubuntu24.04 ubuntu24.04-hwe
for system in "$@"; do
    [[ " debian13 ubuntu24.04 ubuntu24.04-hwe " == *" $system "* ]] ||
        fail "there is no kernel of '$system': take debian13, ubuntu24.04 or ubuntu24.04-hwe"
done
mkdir -p "$kernels"
exec 9>"$kernels/lock"
flock -n 9 || fail "another one runs: wait for it"
[ -x "$kernels/venv/bin/vng" ] || { python3 -m venv "$kernels/venv" && "$kernels/venv/bin/pip" install -q "$virtme"; } ||
    fail "cannot install $virtme: apt install python3-venv, and check the network"

# What the machines run, and as the end-to-end tests want it.
cargo build --release --workspace --lib --bins --examples --locked --quiet || fail "VTL does not build"
# Lines of cargo's: each test's source, and what it was compiled to.
built=$(cargo test --release --workspace --locked --no-run --test e2e $(printf -- '--test %s ' $TESTS) 2>&1) ||
    fail "the tests do not build: cargo test --release --workspace --no-run"
binary() {
    realpath "$(sed -n "s|^ *Executable .*(\(.*/$1-[0-9a-f]*\))$|\1|p" <<<"$built")"
}
binaries=()
for test in $TESTS; do binaries+=("$(binary "$test")"); done
e2e=$(binary e2e)

accel=(--disable-kvm)
[ "${ACCEL:-}" != kvm ] || accel=()
status=0
pids=()
trap 'kill "${pids[@]}" 2>/dev/null; wait; exit 130' INT TERM
for system in "$@"; do
    check "$system" &
    pids+=($!)
done
for pid in "${pids[@]}"; do wait "$pid" || status=1; done
exit $status
