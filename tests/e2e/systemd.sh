#!/bin/sh
# systemd as the first process of namespaces of its own, with vtld's units as they are shipped, but for a drop-in that
# makes the daemon root's, as former versions' was: its removal is an upgrade.
#
#   systemd.sh FOLDER VTLD SOCKET GROUP RUN    the project's folder; a name for its cgroup; a folder for /run/vtl
set -eu

if [ "${6-}" != inside ]; then
    # Both hierarchies where there are two.
    for root in /sys/fs/cgroup /sys/fs/cgroup/unified /sys/fs/cgroup/systemd; do
        [ -e "$root/cgroup.procs" ] || continue
        mkdir -p "$root/$4"
        echo $$ >"$root/$4/cgroup.procs"
    done
    # Its owner changes, and others' sockets are in that of the host.
    mkdir -p "$5"
    ln -sf "$5/$(basename "$3")" "$3"
    exec unshare -m -p -f -C -i -u --kill-child sh "$0" "$@" inside
fi

mount --make-rprivate /
mount -t proc proc /proc
# What systemd finds mounted it leaves alone.
mount --rbind /run /run
mount --bind "$5" /run/vtl
mkdir -p /run/systemd
mount -t tmpfs none /run/systemd
# The user, which this machine need not have.
mkdir -p /run/systemd/users/etc
for file in passwd group shadow gshadow; do
    [ ! -e /etc/$file ] || cp -p /etc/$file /run/systemd/users/etc
done
systemd-sysusers --root=/run/systemd/users "$1/dist/vtl.sysusers"
for file in /run/systemd/users/etc/*; do
    [ ! -e "/etc/${file##*/}" ] || mount --bind "$file" "/etc/${file##*/}"
done
mount -t tmpfs none /var/lib
case $1 in
/tmp/*) ;;
*) mount -t tmpfs none /tmp && mount -t tmpfs none /var/tmp ;;
esac
units=/run/systemd/system
mkdir -p $units/vtld.service.d
sed -e '/network-online/d' -e "s#@PREFIX@/bin/vtld#$2 --socket $3 --driver live#" "$1/dist/vtld.service" \
    >$units/vtld.service
# Nothing else is started, nothing of the host's is written, and the project may lie in a home.
cat >$units/vtld.service.d/test.conf <<EOF
[Unit]
DefaultDependencies=no
[Service]
ProtectHome=no
Environment=VTL_PEERS=$VTL_PEERS
EOF
sed 's/^\[Socket\]/DefaultDependencies=no\n&/' "$1/dist/vtld-frames.socket" >$units/vtld-frames.socket
cat >$units/vtld.service.d/root.conf <<EOF
[Service]
User=root
Group=root
CapabilityBoundingSet=CAP_CHOWN CAP_SYS_ADMIN
AmbientCapabilities=
SystemCallFilter=@chown
EOF
exec env container=vtl /lib/systemd/systemd --system --unit=vtld.service
