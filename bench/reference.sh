#!/bin/bash
# The reference run: the plans of bench/reference, the most important ones first, each into its own
# file in DIR, with what the machine is. About half an hour, as root, on a machine that does nothing else.
#   bench/reference.sh DIR [VTL]
set -u
cd "$(dirname "$0")/.." || exit
out=${1:?where to? usage: bench/reference.sh DIR [VTL]}
vtl=$(realpath "${2:-target/release/vtl}") || exit
mkdir -p "$out"
{
    echo "command  bench/reference.sh: vtl bench run bench/reference/NAME.toml --json NAME.json"
    echo "commit   $(git rev-parse --short HEAD)$(git diff --quiet HEAD -- . || echo ', with changes')"
    echo "kernel   $(uname -r)"
    echo "CPU      $(nproc) x $(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -1)"
} >"$out/about.txt"
failed=0
for plan in bench/reference/*.toml; do
    name=$(basename "$plan" .toml)
    started=$SECONDS
    echo "== $name" >&2
    "$vtl" bench run "$plan" --json "$out/$name.json" >"$out/$name.txt" || failed=1
    echo "seconds  $((SECONDS - started)) for $name" >>"$out/about.txt"
done
"$vtl" bench micro --json "$out/micro.json" >"$out/micro.txt" || failed=1
exit $failed
