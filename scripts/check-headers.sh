#!/usr/bin/env bash
# Compiles all C of the tree that the build or a test compiles, against the headers of the oldest and the newest
# system that the README names, whatever this one has. Fetches those headers once, into target/headers.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
headers=$(realpath -m "${CARGO_TARGET_DIR:-target}/headers")
mirror=http://deb.debian.org/debian
keys=/usr/share/keyrings/debian-archive-keyring.gpg
packages=(linux-libc-dev libc6-dev libusrsctp-dev)
arch=$(dpkg --print-architecture)
libbpf=$(ls -dt "${CARGO_TARGET_DIR:-target}"/release/build/libbpf-sys-*/out/include 2>/dev/null | head -n 1 || true)

# Usage: fetch SUITE; leaves the headers in $headers/SUITE.
fetch() {
    local suite=$1 apt=$headers/$1.apt log=$headers/$1.log
    [ ! -d "$headers/$suite" ] || return 0
    rm -rf "$apt" "$headers/$suite.new"
    mkdir -p "$apt"/{lists/partial,cache/archives/partial,debs} "$headers/$suite.new"
    echo "deb [arch=$arch signed-by=$keys] $mirror $suite main" >"$apt/sources.list"
    : >"$apt/status"
    local options=(-q -o "Dir::Etc::SourceList=$apt/sources.list" -o Dir::Etc::SourceParts=/dev/null
        -o "Dir::State::Lists=$apt/lists" -o "Dir::Cache=$apt/cache" -o "Dir::State::Status=$apt/status"
        -o Acquire::Languages=none -o APT::Sandbox::User=root)
    if ! {
        apt-get "${options[@]}" update && (cd "$apt/debs" && apt-get "${options[@]}" download "${packages[@]}")
    } >"$log" 2>&1; then
        tail -n 5 "$log" >&2
        echo "check-headers: cannot fetch the headers of Debian's $suite from $mirror; check the network, then run this again" >&2
        exit 1
    fi
    local package
    for package in "$apt"/debs/*.deb; do
        dpkg-deb -x "$package" "$headers/$suite.new"
    done
    rm -rf "$apt"
    mv "$headers/$suite.new" "$headers/$suite"
}

# Usage: compiles FILE clang-arguments...
compiles() {
    local file=$1
    shift
    clang-19 --sysroot="$headers/$suite" -fsyntax-only -Wall -Wextra -Werror "$@" "$file" || {
        echo "check-headers: $file does not compile with the headers of Debian's $suite" >&2
        status=1
    }
    count=$((count + 1))
}

check() {
    local suite=$1 file count=0 host=(-std=gnu11 -O1)
    fetch "$suite"
    # With libbpf's headers, which the build brings with it.
    for file in bpf/*.bpf.c bpf/grafts/*.bpf.c bpf/tcp/*.bpf.c; do
        compiles "$file" -target bpf "-D__TARGET_ARCH_$(uname -m | sed 's/x86_64/x86/; s/aarch64/arm64/')" \
            "${ebpf[@]}" -Ibpf -Ibpf/include "-I$libbpf"
    done
    for file in crates/vtl-sim/native/*.c; do
        compiles "$file" "${host[@]}" -fno-strict-aliasing -Icrates/vtl-sim/native -Ibpf -Ibpf/include
    done
    for file in tests/conformance/*.c; do
        compiles "$file" "${host[@]}" -Wpedantic
    done
    for file in crates/vtl-c/tests/*.c examples/*.c; do
        compiles "$file" "${host[@]}" -Iinclude
    done
    compiles crates/vtl-proto/tests/vectors.c "${host[@]}" -DMIN_PAYLOAD=1 -Ibpf/include
    compiles crates/vtld/src/flows/carrier/sctp/peer.c "${host[@]}"
    echo "check-headers: $count files with those of Debian's $suite"
}

status=0
mapfile -t ebpf < <(sed -n 's/^    "\(-.*\)",$/\1/p' crates/vtl-bpf/src/flags.rs)
[ -r $keys ] || { echo "check-headers: needs debian-archive-keyring: make setup" >&2; exit 1; }
[ -n "$libbpf" ] || { echo "check-headers: libbpf is not built: make build" >&2; exit 1; }
mkdir -p "$headers"
check bookworm
check trixie
exit $status
