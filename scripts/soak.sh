#!/usr/bin/env bash
# The long tests: seeds, accidents, load, measurements; as root, on a machine that does nothing else. Ends with a
# report, target/soak/report.txt, and each step's output beside it.
#
#   scripts/soak.sh [BUDGET]     seconds, 3600 unless given; at least 60
#
# What has no natural end (seeds, accidents) is repeated with other moments each time until its share of the budget is
# used up, at least once. What takes a fixed time is left out, and the report says so, where less than that is left.
# Exit status 1 if a test failed. Measurements that are out of bounds are reported, and fail nothing: the machine may
# have been busy.
set -uo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
export PATH="${CARGO_HOME:-$HOME/.cargo}/bin:$PATH:/usr/sbin:/sbin"
budget=${1:-3600}
out=${CARGO_TARGET_DIR:-target}/soak
failed=0
rows=()

fail() {
    printf 'soak: %s\n' "$1" >&2
    exit 2
}

# Usage: test_of PACKAGE cargo-test-arguments...
test_of() {
    local package=$1
    shift
    cargo test --release --locked --quiet -p "$package" "$@"
}

# Usage: e2e TEST; fails also where there is no such test.
e2e() {
    cargo test --release --locked --workspace --test e2e -- --test-threads=1 --include-ignored --exact "$1" 2>&1 |
        tee -a /dev/stderr | grep '1 passed' >/dev/null
}

# Usage: row NAME SECONDS TEXT
row() {
    rows+=("$(printf '%-24s %5d s  %s' "$@")")
    printf '%s\n' "${rows[-1]}"
}

# Usage: during NAME SECONDS COMMAND...; repeats it until its share of the budget, SECONDS of each hour, is used up
during() {
    local name=$1 seconds=$(($2 * budget / 3600)) begin=$SECONDS round
    shift 2
    : >"$out/$name.log"
    for ((round = 0; round == 0 || SECONDS - begin < seconds; round++)); do
        if ! "$@" >>"$out/$name.log" 2>&1; then
            failed=1
            row "$name" $((SECONDS - begin)) "FAILED in round $((round + 1)): $out/$name.log"
            return
        fi
    done
    row "$name" $((SECONDS - begin)) "ok, $round rounds"
}

# Usage: once NAME SECONDS VERDICT COMMAND...; it takes about SECONDS, and the report calls its failure VERDICT.
once() {
    local name=$1 seconds=$2 verdict=$3 begin=$SECONDS
    shift 3
    if [ $((SECONDS + seconds)) -gt "$budget" ]; then
        row "$name" 0 "left out: takes $seconds s"
    elif "$@" >"$out/$name.log" 2>&1; then
        row "$name" $((SECONDS - begin)) ok
    else
        [ "$verdict" != FAILED ] || failed=1
        row "$name" $((SECONDS - begin)) "$verdict: $out/$name.log"
    fi
}

report() {
    {
        printf 'make soak, %s, %s, %d s of %d\n\n' "$(git describe --always --dirty)" "$(date -Iminutes)" "$SECONDS" "$budget"
        printf '%s\n' "${rows[@]}"
        [ ! -s "$VTL_SKIPPED" ] || { printf '\nskipped:\n' && sort -u "$VTL_SKIPPED"; }
    } >"$out/report.txt"
    printf 'soak: %s\n' "$out/report.txt"
}

# A number that no earlier round had, in all likelihood; the logs have it.
any() {
    echo $((RANDOM * 32768 + RANDOM))
}

seeds() {
    local first
    first=$(($(any) * 1000))
    echo "seeds from $first"
    VTL_SIM_SEEDS=$first..$((first + 1000)) test_of vtl-sim --test grafts
}

properties() {
    PROPTEST_CASES=20000 test_of vtl-proto --lib
}

accidents() {
    local first
    first=$(($(any) * 9))
    echo "rounds from $first"
    ROUNDS=$first..$((first + 9)) e2e accidents::accidents__hundreds
}

conformance() {
    CONFORMANCE_CARRIER=$1 e2e conformance::sockets__behave_as_over_tcp_by_a_kind
}

# All targets, for a ninth of the budget.
fuzz() {
    scripts/fuzz.sh $((budget * $(nproc) / 9 / $(grep -c '^\[\[bin\]\]' fuzz/Cargo.toml) + 1))
}

measure() {
    once "$1" "$2" 'OUT OF BOUNDS' "${@:3}"
}

[[ $budget =~ ^[0-9]+$ ]] && [ "$budget" -ge 60 ] ||
    fail "'$budget' is no budget: give seconds, 60 or more"
[ "$(id -u)" = 0 ] || fail "needs root, for hosts and links between them: run it with sudo"
mkdir -p "$out"
VTL_SKIPPED=$(realpath "$out")/skipped
export VTL_SKIPPED
rm -f "$VTL_SKIPPED"
trap report EXIT
trap 'exit 130' INT TERM
echo 'soak: building'
cargo test --release --workspace --locked --quiet --no-run || fail "the tests do not build"
scripts/fuzz.sh build || fail "the fuzz targets do not build"
SECONDS=0

during seeds 500 seeds
during properties 300 properties
once changes 300 FAILED test_of vtl-sim --test results -- --ignored results__of_thousands_of_changes
if command -v qemu-system-x86_64 >/dev/null && command -v busybox >/dev/null; then
    once kernels 500 FAILED scripts/check-kernels.sh
else
    row kernels 0 "left out: no QEMU or no busybox here"
fi
once neighbours 200 FAILED test_of vtl-sim --test results -- --ignored results__beside_all_neighbours
during fuzz 1 fuzz
once sanitize 400 FAILED make sanitize
during accidents 700 accidents
once fallback 330 FAILED e2e outage::path_that_drops_vtl__a_hundred_times
once moves 400 FAILED e2e flows::moves__a_thousand
once restarts 120 FAILED e2e talk::take_over__a_hundred_times_under_two_hundred_flows
once restart-idle 40 FAILED e2e talk::take_over__of_ten_thousand_idle_flows
once systemd 120 FAILED e2e systemd::restart__by_systemd
once load 300 FAILED e2e load::load__two_thousand_a_second_for_a_minute
once idle 60 FAILED e2e many::sessions__ten_thousand_idle_ones_and_their_application_dies
for carrier in sctp mptcp graft:cubic graft:newreno graft:hybla; do
    once "conformance-${carrier/:/-}" 60 FAILED conformance "$carrier"
done
measure testbed 90 test_of vtl-testbed --test accuracy -- --ignored --test-threads=1
for control in hybla__grows_on_500_ms_as_reno_does_on_25_ms vegas__keeps_the_queue_short \
    westwood__goes_on_behind_random_losses dctcp__cuts_in_proportion_to_the_marks; do
    measure "${control%%__*}" 30 e2e "controls::$control"
done
exit $failed
