#!/bin/bash
# Boots a real systemd on an overlay of /, inside namespaces of its own; run under
#   unshare --pid --mount --uts --ipc --cgroup --fork --kill-child
# TREE holds what `tinyloop deploy systemd --prefix` wrote; REACHABLE are paths that the service user must reach.
# The private /tmp, /var/tmp and /run and the masked units keep it from touching anything outside.
set -euo pipefail
mount --make-rprivate /
scratch=/mnt/tinyloop-systemd
mkdir -p "$scratch"
mount -t tmpfs tmpfs "$scratch"
mkdir -p "$scratch"/{upper,work,root}
mount -t overlay overlay -o "lowerdir=/,upperdir=$scratch/upper,workdir=$scratch/work" "$scratch/root"
cd "$scratch/root"
kept=$(mktemp -d "$scratch/tree.XXXX") # TREE may lie in the /tmp that is about to be covered
cp -a "$TREE/." "$kept"
for folder in tmp var/tmp run; do mount -t tmpfs tmpfs "$folder"; done
mount -t proc proc proc
mount -t sysfs sysfs sys
mount --rbind /dev dev
mount -t cgroup2 none sys/fs/cgroup
cp -a "$kept/." .
for path in $REACHABLE; do
    while [[ $path != / ]]; do
        chmod o+rx ".$path"
        path=$(dirname "$path")
    done
done
systemd-sysusers --root="$PWD" tinyloop.conf
mkdir -p run/systemd/system
for unit in systemd-tmpfiles-{setup,setup-dev,clean}.service systemd-tmpfiles-clean.timer systemd-udevd.service \
    systemd-udev-trigger.service systemd-{journal-flush,sysctl,random-seed,modules-load,remount-fs}.service \
    sys-kernel-{config,debug,tracing}.mount dev-{hugepages,mqueue}.mount; do
    ln -sf /dev/null "run/systemd/system/$unit"
done
mkdir -p .old # pivot_root and not chroot: in a chroot no service could have a user namespace (unshare(2): EPERM)
pivot_root . .old
cd /
umount -l /.old
exec env container=tinyloop /lib/systemd/systemd --system --unit=basic.target --log-target=console --show-status=0
