#!/bin/sh
# systemd as the first process of namespaces of its own. It starts vtld by a unit as former versions had it, of root.
# In /run/systemd/upgrade are the units as they are shipped.
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
    # The project may lie where the unit's user cannot go.
    cp "$2" "$5/vtld"
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
systemd-sysusers --root=/run/systemd/users - <"$1/dist/vtl.sysusers"
for file in /run/systemd/users/etc/*; do
    [ ! -e "/etc/${file##*/}" ] || mount --bind "$file" "/etc/${file##*/}"
done
mount -t tmpfs none /var/lib
case $1 in
/tmp/*) ;;
*) mount -t tmpfs none /tmp && mount -t tmpfs none /var/tmp ;;
esac
units=/run/systemd/system
new=/run/systemd/upgrade
mkdir -p $units/vtld.service.d $new
sed -e '/network-online/d' -e "s#@PREFIX@/bin/vtld#/run/vtl/vtld --socket $3 --driver live#" "$1/dist/vtld.service" \
    >$new/vtld.service
sed 's/^\[Socket\]/DefaultDependencies=no\n&/' "$1/dist/vtld-frames.socket" >$new/vtld-frames.socket
sed -e '/vtld-frames/d' -e '/^\(User\|Group\|Ambient\)/d' -e 's/^CapabilityBounding.*/& CAP_CHOWN CAP_SYS_ADMIN/' \
    -e 's/^RestrictNamespaces=.*/RestrictNamespaces=net/' -e 's/^SystemCallFilter=bpf/& @chown/' \
    $new/vtld.service >$units/vtld.service
# Nothing else is started, nothing of the host's is written, and the project may lie in a home.
cat >$units/vtld.service.d/test.conf <<EOF
[Unit]
DefaultDependencies=no
[Service]
ProtectHome=no
Environment=VTL_PEERS=$VTL_PEERS
StandardError=append:/run/vtl/log
EOF
exec env container=vtl /lib/systemd/systemd --system --unit=vtld.service
