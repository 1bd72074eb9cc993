#!/bin/sh
# Installs what is missing of tools/packages.txt with apt-get. On other systems it names the packages and goes on, so
# that `make` says what it cannot find.
set -eu
list=$(dirname "$0")/packages.txt
if ! command -v apt-get >/dev/null 2>&1; then
    echo "deps: no apt-get here; the packages, by RHEL/Fedora name:$(awk '!/^#/ {printf " %s", $2}' "$list")"
    exit 0
fi
missing=""
for p in $(awk '!/^#/ {print $1}' "$list"); do
    dpkg-query -W -f='${Status}' "$p" 2>/dev/null | grep -q 'ok installed' || missing="$missing $p"
done
[ -z "$missing" ] && exit 0
echo "deps: installing$missing"
sudo=""
[ "$(id -u)" = 0 ] || sudo=sudo
export DEBIAN_FRONTEND=noninteractive
$sudo apt-get update -q >/dev/null
# shellcheck disable=SC2086
$sudo apt-get install -y -q --no-install-recommends $missing >/dev/null
