#!/usr/bin/env bash
# Makes the C library of crates/vtl-c: libvtl.so.N with versioned symbols, libvtl.a, libvtl.so, and
# vtl.pc, which says where they will be installed.
#
#   scripts/libvtl.sh DIRECTORY [PREFIX]     all of it, into DIRECTORY; PREFIX is /usr/local if not given
#
# VTL_ARCHIVE is the path of the static library from `/` on where cargo has built it with all of the workspace (`make build`).
#
# rustc gives shared libraries a version script without names, so the linker is called here.
set -euo pipefail

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
out=$(realpath -m "${1:?usage: $0 DIRECTORY [PREFIX]}")
prefix=${2:-/usr/local}
cd "$repo"

built=${VTL_ARCHIVE:-}
if [ -z "$built" ]; then
    ${CARGO:-cargo} build --release --quiet --locked -p vtl-c
    built=${CARGO_TARGET_DIR:-target}/release/libvtl_c.a
fi
version=$(sed -n '/^\[workspace.package\]/,/^\[/s/^version = "\(.*\)"/\1/p' Cargo.toml)
name=libvtl.so.${version%%.*}

mkdir -p "$out"
# Written beside, then moved: a program that runs keeps the library it has.
work=$(mktemp -d "$out/libvtl.XXXXXX")
trap 'rm -rf "$work"' EXIT
strip --strip-debug -o "$work/libvtl.a" "$built"
mapfile -t symbols < <(sed -n 's/^ *\(vtl_[a-z_]*\);$/-Wl,-u,\1/p' crates/vtl-c/libvtl.map)
${CC:-cc} -shared -o "$work/$name" "${symbols[@]}" "$work/libvtl.a" \
    -Wl,-soname,"$name" -Wl,--version-script=crates/vtl-c/libvtl.map \
    -Wl,--gc-sections -Wl,--as-needed -Wl,-z,relro,-z,now -Wl,--no-undefined \
    -lgcc_s -lpthread -lm -ldl -lc
strip --strip-unneeded "$work/$name"
ln -s "$name" "$work/libvtl.so"
sed -e "s|@PREFIX@|$prefix|" -e "s|@VERSION@|$version|" dist/vtl.pc.in >"$work/vtl.pc"
mv -f "$work"/* "$out/"
