#!/bin/bash
# both.sh ROUNDS: old and tip in turns
for r in $(seq $1); do for w in old main; do for p in lat wire small; do
  t=hook:graft; [ $w = old ] && t=hook:graft:stream
  sed "s/^transports = .*/transports = [\"tcp-cubic\", \"$t\"]/" /work/main/bench/results/2026-11-23-grafts/$p.toml > /tmp/$p-$w.toml
  unshare --mount --propagation private bash -c "mount -t tmpfs none /run; mkdir -p /run/lock; PATH=/work/$w/target/release:\$PATH timeout 400 vtl bench run /tmp/$p-$w.toml --runs 2 --json /work/logs/both-$p-$w-$r.json" 2>&1 | sed -n '/^conditions/,$p' | cut -c1-150 | sed "s/^/$w $r /"
done; done; done
