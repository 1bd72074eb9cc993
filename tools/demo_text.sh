#!/bin/sh
# English prose for the demo: tools/demo_text.sh OUT
# TEXT="file ..." uses your own files. Otherwise a dictionary written in whole sentences is fetched as a Debian package
# with apt-get and unpacked beside OUT without being installed: every k-th entry of it, about 6 MB in all.
set -eu
if [ $# -ne 1 ]; then
    echo "usage: tools/demo_text.sh OUT (TEXT=\"file ...\" uses your own files)" >&2
    exit 1
fi
out=$1
bytes=6000000

if [ -n "${TEXT:-}" ]; then
    # shellcheck disable=SC2086
    for f in $TEXT; do
        if [ ! -f "$f" ] || [ ! -r "$f" ]; then
            echo "demo_text: TEXT names $f, which is no readable file" >&2
            exit 1
        fi
    done
    # A blank line between files, so that they stay apart where documents are split at blank lines.
    # shellcheck disable=SC2086
    for f in $TEXT; do
        cat "$f"
        printf '\n\n'
    done >"$out.tmp"
    mv "$out.tmp" "$out"
    exit 0
fi

if ! command -v apt-get >/dev/null 2>&1 || ! command -v dpkg-deb >/dev/null 2>&1; then
    echo "demo_text: no apt-get and dpkg-deb here to fetch English text: give your own with TEXT=\"file ...\"" >&2
    exit 1
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
sudo=""
[ "$(id -u)" = 0 ] || sudo=sudo

download() {
    (cd "$work" && apt-get download -qq -o APT::Sandbox::User=root "$1") >"$work/log" 2>&1
}

fetch() {
    for package in dict-gcide dict-foldoc dict-wn; do
        download "$package" && return 0
    done
    return 1
}

# A fresh machine has no package lists yet.
fetch || { $sudo apt-get update -qq >/dev/null 2>&1 && fetch; } || {
    echo "demo_text: apt-get offers none of dict-gcide, dict-foldoc, dict-wn ($(tail -n 1 "$work/log"));" \
        "give your own text with TEXT=\"file ...\"" >&2
    exit 1
}
dpkg-deb -x "$work"/*.deb "$work/tree"
gzip -dc <"$(find "$work/tree" -name '*.dict.dz' | head -n 1)" >"$work/text"

# An entry begins with a line that is not indented after a blank one. The preface is left out; entries come from the
# whole alphabet.
LC_ALL=C awk -v size="$(wc -c <"$work/text")" -v bytes="$bytes" '
    BEGIN { RS = ""; k = int(size / bytes); if (k < 1) k = 1 }
    /^[^ ]/ { entry++ }
    entry > 100 && entry % k == 0 { print $0 "\n" }
' "$work/text" >"$out.tmp"
mv "$out.tmp" "$out"
