#!/bin/sh
# Shoal in one file: this script, and below it a folder, compressed. The first start unpacks the folder into the user's
# cache, whole or not at all; every start runs it from there. `rm -r` of that folder undoes it.
name=@NAME@ bytes=@BYTES@ offset=@OFFSET@ megabytes=@MEGABYTES@ glibc=@GLIBC@

fail() {
    printf 'shoal: error: %s\n' "$1" >&2
    exit 2
}

cache_folder() {
    PATH=$PATH:/usr/bin:/bin
    home=${HOME:-$(getent passwd "$(id -u)" 2>/dev/null | cut -d: -f6)}
    [ -n "${XDG_CACHE_HOME:-$home}" ] || fail "there is no home folder to unpack to; set XDG_CACHE_HOME to a folder"
    printf '%s/shoal/standalone' "${XDG_CACHE_HOME:-$home/.cache}"
}

check_machine() {
    [ "$(uname -sm)" = "Linux x86_64" ] || fail "this file is for Linux on x86_64, not $(uname -sm); install Shoal by pip"
    [ -e /lib64/ld-linux-x86-64.so.2 ] || fail "this file needs glibc, which this system lacks; install Shoal by pip"
    has=$(getconf GNU_LIBC_VERSION 2>/dev/null) && has=${has#*2.} && [ "${has%%[!0-9]*}" -lt "$glibc" ] 2>/dev/null &&
        fail "this file needs glibc 2.$glibc or newer, and this system has 2.$has; install Shoal by pip"
    [ "$(wc -c <"$0")" -eq "$bytes" ] || fail "$0 has $(wc -c <"$0") bytes and should have $bytes; fetch it again"
}

unpack() {
    PATH=$PATH:/usr/bin:/bin
    check_machine
    part=
    trap '[ -z "$part" ] || rm -rf "$part"' EXIT
    trap 'exit 130' HUP INT TERM
    mkdir -p "$cache" 2>/dev/null && part=$(mktemp -d "$cache/part-XXXXXXXX" 2>/dev/null) ||
        fail "nothing can be written to $cache; set XDG_CACHE_HOME to a folder that this user may write to"
    find "$cache" -maxdepth 1 -name 'part-*' -mmin +60 -exec rm -rf {} + # of starts that were killed
    set -- $(df -Pk "$cache" 2>/dev/null | tail -n 1)
    [ "${4:-$((megabytes * 1000))}" -ge $((megabytes * 1000)) ] ||
        fail "$cache has $(($4 / 1000)) MB free and needs $megabytes; make room, or set XDG_CACHE_HOME to a folder with more"
    echo "unpacking Shoal, once, into $cache ($megabytes MB)" >&2
    said=$(tail -c +"$offset" "$0" | tar -xzf - -C "$part" 2>&1) ||
        fail "it cannot be unpacked into $cache: $(printf %s "$said" | head -n 1)"
    sync -f "$part" 2>/dev/null # a power cut must not leave a folder of its name with empty files
    mv -T "$part" "$folder" 2>/dev/null || [ -e "$folder/shoal" ] || # another start was faster
        fail "$part cannot be renamed to $folder"
}

cache=$(cache_folder) || exit
folder=$cache/$name
if [ ! -e "$folder/shoal" ]; then
    (unpack) || exit
    [ -x "$folder/shoal" ] || fail "programs may not run from $cache; set XDG_CACHE_HOME to a folder where they may"
fi
exec "$folder/shoal" "$@"
