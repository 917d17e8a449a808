#!/usr/bin/env bash
# Installs what building, testing and demonstrating VTL needs: system packages and the pinned Rust
# toolchain. Safe to run at any time; says nothing when nothing is missing.
#
#   scripts/setup.sh          install what is missing (root is needed only if packages are)
#   scripts/setup.sh --check  only say what is missing; exit 1 if anything is
#
# Supported: Debian 12, Debian 13, Ubuntu 24.04.
set -euo pipefail

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PATH="${CARGO_HOME:-$HOME/.cargo}/bin:$PATH:/usr/sbin:/sbin"

# One line per need: the package, and the command, file or module that proves it is there. A need that is
# met by other means (a compiler built from source, say) installs nothing.
needs='
clang-19          clang-19
libclang1-19      /usr/lib/llvm-19/lib/libclang-[0-9]*.so*
clang-format-19   clang-format-19
gcc               gcc
libc6-dev         /usr/include/stdio.h
linux-libc-dev    /usr/include/linux/bpf.h
make              make
pkg-config        pkg-config
libelf-dev        /usr/include/libelf.h
zlib1g-dev        /usr/include/zlib.h
libusrsctp-dev    /usr/include/usrsctp.h
ca-certificates   /etc/ssl/certs/ca-certificates.crt
curl              curl
git               git
iproute2          ip
iputils-ping      ping
ethtool           ethtool
nftables          nft
nginx             nginx
docker-registry   docker-registry
openssh-client    scp
openssh-server    sshd
redis-server      redis-server
redis-tools       redis-benchmark
python3-aiosmtpd  aiosmtpd
binutils          objdump
python3           python3
valgrind          valgrind
debian-archive-keyring /usr/share/keyrings/debian-archive-keyring.gpg
python3-venv      python3:ensurepip
'

fail() {
    printf 'setup: %s\n' "$1" >&2
    exit 1
}

have() {
    case $1 in
    python3:*) command -v python3 >/dev/null && python3 -c "import ${1#*:}" 2>/dev/null ;;
    /*) compgen -G "$1" >/dev/null ;;
    *) command -v "$1" >/dev/null ;;
    esac
}

missing_packages() {
    local package proof
    while read -r package proof; do
        [ -z "$package" ] || have "$proof" || printf '%s\n' "$package"
    done <<<"$needs"
}

pinned_toolchain() {
    sed -n 's/^channel *= *"\(.*\)"/\1/p' "$repo/rust-toolchain.toml"
}

# True if `cargo` runs the pinned toolchain, or a newer one that is not managed by rustup, with
# rustfmt and clippy. Looks at files, because starting rustup costs longer than the rest of this
# script.
have_toolchain() {
    local pinned version dir
    pinned=$(pinned_toolchain)
    command -v cargo >/dev/null || return 1
    if command -v rustup >/dev/null; then
        for dir in "${RUSTUP_HOME:-$HOME/.rustup}/toolchains/$pinned-"*; do
            [ -x "$dir/bin/rustc" ] && [ -x "$dir/bin/rustfmt" ] && [ -x "$dir/bin/cargo-clippy" ] &&
                return 0
        done
        return 1
    fi
    version=$(cargo --version | cut -d' ' -f2)
    [ "$(printf '%s\n%s\n' "$pinned" "$version" | sort -V | head -n1)" = "$pinned" ] &&
        command -v cargo-clippy >/dev/null && command -v rustfmt >/dev/null
}

# Packages such as nginx start their service when they are installed. The demo runs its own server
# in its own namespace, so nothing may be started, stopped or left enabled on the user's machine.
deny_service_starts() {
    [ -e /usr/sbin/policy-rc.d ] && return
    printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d
    chmod +x /usr/sbin/policy-rc.d
    trap 'rm -f /usr/sbin/policy-rc.d' EXIT
    trap 'exit 130' INT TERM
}

# Usage: apt_run MESSAGE apt-get-arguments...; shows apt's own words only when it fails.
apt_run() {
    local message=$1 log
    shift
    log=$(mktemp)
    printf 'setup: %s\n' "$message"
    if ! DEBIAN_FRONTEND=noninteractive NEEDRESTART_SUSPEND=1 \
        apt-get -y -q -o DPkg::Lock::Timeout=300 "$@" >"$log" 2>&1; then
        tail -n 20 "$log" >&2
        rm -f "$log"
        fail "apt-get $1 failed (its last lines are above); check the network and /etc/apt/sources.list, then run this again"
    fi
    rm -f "$log"
}

# True if apt can install the package. `apt-cache show` would not do: it also knows names that other
# packages merely mention.
packaged() {
    [ -n "$(apt-cache madison "$1" 2>/dev/null)" ]
}

install_packages() {
    local package absent=() units
    command -v apt-get >/dev/null ||
        fail "missing: $*; this script installs only with apt (Debian 12, 13, Ubuntu 24.04): install these yourself, then run it again"
    [ "$(id -u)" = 0 ] ||
        fail "missing packages: $*; run 'sudo $0' once to install them"
    apt_run "refreshing the package lists" update
    for package in "$@"; do
        packaged "$package" || absent+=("$package")
    done
    [ ${#absent[@]} = 0 ] ||
        fail "this distribution has no package ${absent[*]}; VTL is set up on Debian 12, Debian 13 and Ubuntu 24.04 (with 'universe' enabled)"
    deny_service_starts
    apt_run "installing $* (a minute or two)" install --no-install-recommends "$@"
    if [ -d /run/systemd/system ]; then
        for package in "$@"; do
            case $package in
            nginx | docker-registry | redis-server) units=("$package") ;;
            openssh-server) units=(ssh.service ssh.socket) ;;
            *) continue ;;
            esac
            systemctl disable --quiet "${units[@]}" 2>/dev/null || true
        done
    fi
}

install_rustup() {
    # Debian 13 and Ubuntu 24.04 package rustup. It would replace an installed `cargo` package, so
    # it is used only where there is none.
    if [ "$(id -u)" = 0 ] && ! command -v cargo >/dev/null && packaged rustup; then
        apt_run "installing rustup" install --no-install-recommends rustup
        return
    fi
    # What the script at https://sh.rustup.rs would fetch: its own host is one name less to reach.
    local base dir
    base=${RUSTUP_UPDATE_ROOT:-https://static.rust-lang.org/rustup}/dist/$(uname -m)-unknown-linux-gnu
    printf 'setup: installing rustup from %s into %s\n' "$base" "${CARGO_HOME:-$HOME/.cargo}"
    dir=$(mktemp -d)
    if ! (
        cd "$dir" &&
        curl --proto '=https' --tlsv1.2 -sSfL --remote-name-all "$base/rustup-init" "$base/rustup-init.sha256" &&
        printf '%s  rustup-init\n' "$(cut -d' ' -f1 rustup-init.sha256)" | sha256sum --check --quiet &&
        chmod +x rustup-init &&
        ./rustup-init -y -q --no-modify-path --profile minimal --default-toolchain none >/dev/null
    ); then
        rm -rf "$dir"
        fail "cannot install rustup; check the network, or install Rust $(pinned_toolchain) by hand (https://rustup.rs), then run this again"
    fi
    rm -rf "$dir"
}

install_toolchain() {
    command -v rustup >/dev/null || install_rustup
    hash -r
    printf 'setup: installing Rust %s\n' "$(pinned_toolchain)"
    rustup toolchain install "$(pinned_toolchain)" --no-self-update \
        --profile minimal -c rustfmt -c clippy >/dev/null ||
        fail "rustup could not install Rust $(pinned_toolchain); check the network (https://static.rust-lang.org), then run this again"
}

mapfile -t packages < <(missing_packages)

if [ "${1:-}" = --check ]; then
    status=0
    [ ${#packages[@]} = 0 ] || { printf 'missing packages: %s\n' "${packages[*]}"; status=1; }
    have_toolchain || { printf 'missing: Rust %s\n' "$(pinned_toolchain)"; status=1; }
    exit $status
elif [ $# -gt 0 ]; then
    fail "unknown argument '$1'; usage: $0 [--check]"
fi

[ ${#packages[@]} = 0 ] || install_packages "${packages[@]}"
have_toolchain || install_toolchain
