#!/usr/bin/env bash
# Runs the fuzz targets, one to each processor, from their committed corpora; any finding fails.
#
#   scripts/fuzz.sh [SECONDS [TARGET...]]    20 s each unless said otherwise, all targets unless some are named
#   scripts/fuzz.sh build                    only builds them
#   scripts/fuzz.sh replay [TARGET...]       runs what is in the corpora, each input once, in targets built without
#                                            AddressSanitizer and coverage: soon done, and finds nothing new
#   scripts/fuzz.sh merge [TARGET...]        adds what was found since to the committed corpora, as few inputs as
#                                            reach the same code
#
# What a run finds new is kept in target/fuzz/corpus, for the next one, and what fails in target/fuzz/artifacts. The
# toolchain is the pinned one: coverage is its LLVM's, and of what cargo-fuzz passes only AddressSanitizer is not
# stable yet.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
what=${1:-20}
[ $# = 0 ] || shift
case $what in
build | replay | merge) ;;
*[!0-9]* | '' | 0)
    printf 'fuzz: "%s" is no number of seconds\n' "$what" >&2
    exit 2
    ;;
esac
mkdir -p "${CARGO_TARGET_DIR:-target}/fuzz/corpus" "${CARGO_TARGET_DIR:-target}/fuzz/logs"
build=$(cd "${CARGO_TARGET_DIR:-target}/fuzz" && pwd)
# libFuzzer is C++, and a compiler for that comes with clang.
export CXX=${CXX:-clang++-19}
if [ $# = 0 ]; then
    selected=(--bins)
    mapfile -t targets < <(sed -n '/^\[\[bin\]\]/,$s/^name = "\(.*\)"/\1/p' fuzz/Cargo.toml)
else
    selected=("${@/#/--bin=}")
    targets=("$@")
fi

if [ "$what" = replay ]; then
    bin=$build/../debug
    cargo build --locked --quiet --manifest-path fuzz/Cargo.toml "${selected[@]}" --target-dir "$build/.."
else
    host=$(rustc --version --verbose | sed -n 's/^host: //p')
    bin=$build/$host/release
    flags="--cfg fuzzing -Zsanitizer=address -Cpasses=sancov-module"
    for option in level=4 inline-8bit-counters pc-table trace-compares; do
        flags+=" -Cllvm-args=-sanitizer-coverage-$option"
    done
    # In a folder of its own: RUSTC_BOOTSTRAP has `make build` do its work again.
    RUSTFLAGS=$flags RUSTC_BOOTSTRAP=1 cargo build --release --locked --quiet --manifest-path fuzz/Cargo.toml \
        "${selected[@]}" --target "$host" --target-dir "$build"
fi
[ "$what" != build ] || exit 0

# Usage: run TARGET; 1 if it finds anything, with how to run that again.
run() {
    local name=$1 own=$build/corpus/$1 seeds=fuzz/corpus/$1 log=$build/logs/$1 made line
    mkdir -p "$own" "$seeds" "$build/artifacts/$name"
    local options=(-rss_limit_mb=2048 -timeout=30 -max_len=65536 -len_control=10 -print_final_stats=1
        "-artifact_prefix=$build/artifacts/$name/")
    case $what in
    replay)
        set -- "$seeds"/*
        if [ ! -e "$1" ]; then
            printf 'fuzz: %s has no corpus: scripts/fuzz.sh merge %s makes one, after a run\n' "$name" "$name" >&2
            return 1
        fi
        ;;
    merge) set -- -set_cover_merge=1 -use_counters=0 "$seeds" "$own" ;;
    *) set -- "-max_total_time=$what" -malloc_limit_mb=512 "$own" "$seeds" ;;
    esac
    if "$bin/$name" "${options[@]}" "$@" >"$log" 2>&1; then
        line=$(sed -n 's/.*number_of_executed_units: */executions: /p' "$log" | tail -n1)
        [ "$what" = replay ] || printf 'fuzz: %-17s %s\n' "$name" "${line:-done}"
        return 0
    fi
    grep -m1 -E 'panicked|SUMMARY|ERROR' -A1 "$log" >&2 || tail -n 5 "$log" >&2
    made=$(sed -n 's/.*Test unit written to //p; s/^Running: //p' "$log" | tail -n1)
    printf 'fuzz: %s fails (%s); to see it again, run %s/%s %s\n' "$name" "$log" "$bin" "$name" "${made:-$seeds}" >&2
    # For whoever has no more than what this prints.
    if [ -f "$made" ] && [ "$(stat -c %s "$made")" -le 3000 ]; then
        printf 'fuzz: which is, by base64 -d: %s\n' "$(base64 -w 0 "$made")" >&2
    fi
    return 1
}

status=0
running=0
for name in "${targets[@]}"; do
    if [ "$running" -ge "${FUZZ_JOBS:-$(nproc)}" ]; then
        wait -n || status=1
        running=$((running - 1))
    fi
    run "$name" &
    running=$((running + 1))
done
while [ "$running" -gt 0 ]; do
    wait -n || status=1
    running=$((running - 1))
done
exit "$status"
