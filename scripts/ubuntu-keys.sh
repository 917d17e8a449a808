#!/usr/bin/env bash
# Fetches the keys of Ubuntu's archive, of which Debian has no package, and prints the file's path.
# A program of its own: what calls it may go on behind a command that fails, and this does not.
#
#   scripts/ubuntu-keys.sh DIRECTORY     where they go
set -euo pipefail

package=http://archive.ubuntu.com/ubuntu/pool/main/u/ubuntu-keyring/ubuntu-keyring_2023.11.28.1_all.deb
sha256=36de43b15853ccae0028e9a767613770c704833f82586f28eb262f0311adb8a8

mkdir -p "$1"
curl -sSf -o "$1/keys.deb" $package
echo "$sha256  $1/keys.deb" | sha256sum --check --quiet
dpkg-deb -x "$1/keys.deb" "$1"
echo "$1/usr/share/keyrings/ubuntu-archive-keyring.gpg"
