# Sourced by the scripts beside it: two hosts in namespaces, joined by the testbed's link, each with a vtld.
# They have in `bin` the directory of the binaries, and get `dir`, a directory for their files, and `to`, the
# server's address. At the script's end, however it comes, nothing is left.

# need SCRIPT TOOL...: ends where a tool is missing.
need() {
    for tool in "${@:2}"; do
        command -v "$tool" >/dev/null || { echo "$1: no $tool" >&2; exit 1; }
    done
}

# link SCRIPT OPTION...: the hosts, with options of `vtl testbed up`.
link() {
    dir=$(mktemp -d "/tmp/vtl-$1.XXXXXX")
    name=$1-$$
    to=10.73.0.2
    pids=()
    "$bin/vtl" testbed --name "$name" up "${@:2}" >&2 || { rmdir "$dir"; exit 1; }
    trap down EXIT
    trap 'exit 130' INT TERM
}

down() {
    kill "${pids[@]}"
    wait "${pids[@]}" 2>/dev/null
    "$bin/vtl" testbed --name "$name" down >&2
    rm -rf "$dir"
}

# on HOST COMMAND...
on() { host=$1; shift; VTL_SOCKET="$dir/$host.sock" ip netns exec "$name-$host" "$@"; }

# The same in the background, until the script ends.
start() { on "$@" >>"$dir/log" 2>&1 & pids+=($!); }

# Both daemons, once they answer.
daemons() {
    for host in server client; do
        VTL_STATE="$dir/$host" start "$host" "$bin/vtld"
        until on "$host" "$bin/vtl" status >/dev/null 2>&1; do
            kill -0 "${pids[-1]}" || { cat "$dir/log" >&2; exit 1; }
            sleep 0.1
        done
    done
}
