#!/bin/sh
# systemd as the first process of namespaces of its own, with vtld's unit as it is shipped.
#
#   systemd.sh FOLDER VTLD SOCKET GROUP    the project's folder; a name for its cgroup
set -eu

if [ "${5-}" != inside ]; then
    # Both hierarchies where there are two.
    for root in /sys/fs/cgroup /sys/fs/cgroup/unified /sys/fs/cgroup/systemd; do
        [ -e "$root/cgroup.procs" ] || continue
        mkdir -p "$root/$4"
        echo $$ >"$root/$4/cgroup.procs"
    done
    exec unshare -m -p -f -C -i -u --kill-child sh "$0" "$@" inside
fi

mount --make-rprivate /
mount -t proc proc /proc
# What systemd finds mounted it leaves alone.
mount --rbind /run /run
mkdir -p /run/systemd
mount -t tmpfs none /run/systemd
case $1 in
/tmp/*) ;;
*) mount -t tmpfs none /tmp && mount -t tmpfs none /var/tmp ;;
esac
unit=/run/systemd/system/vtld.service
mkdir -p $unit.d
sed -e '/network-online/d' -e "s#@PREFIX@/bin/vtld#$2 --socket $3#" "$1/dist/vtld.service" >$unit
# Nothing else is started, nothing of the host's is written, and the project may lie in a home.
cat >$unit.d/test.conf <<EOF
[Unit]
DefaultDependencies=no
[Service]
StateDirectory=
ProtectHome=no
Environment=VTL_STATE=$VTL_STATE VTL_PEERS=$VTL_PEERS
EOF
exec env container=vtl /lib/systemd/systemd --system --unit=vtld.service
