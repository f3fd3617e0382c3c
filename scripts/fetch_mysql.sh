#!/usr/bin/env bash
# Fetch a MySQL server for the tests without installing it: Debian's packages of the suite `sid`, from the mirror that
# this machine uses, unpacked into a cache folder. Does nothing if the folder is complete, or if a server is installed.
# tests/support/mysql.py starts the server from there, with the folder's own libraries.
set -euo pipefail

target=${XDG_CACHE_HOME:-$HOME/.cache}/firnline-tests/mysql
[ ! -e "$target/complete" ] || exit 0
if command -v mysqld >/dev/null 2>&1 && ! mysqld --version 2>/dev/null | grep -qi mariadb; then exit 0; fi

fail() {
  echo "Error: $1" >&2
  echo "Try: install a MySQL server so that mysqld is on the PATH, or run bash scripts/fetch_mysql.sh again" >&2
  exit 1
}

for program in apt-get dpkg dpkg-deb; do
  command -v "$program" >/dev/null 2>&1 || fail "$program is missing: a MySQL server can be fetched on Debian only"
done
mirror=$(apt-get indextargets --format '$(REPO_URI) $(ORIGIN)' 'Created-By: Packages' | awk '$2 == "Debian" { print $1 }' |
  grep -v security | head -n 1)
[ -n "$mirror" ] || { apt-get update -qq || true; mirror=$(apt-get indextargets --format '$(REPO_URI) $(ORIGIN)' \
  'Created-By: Packages' | awk '$2 == "Debian" { print $1 }' | grep -v security | head -n 1); }
[ -n "$mirror" ] || fail "no mirror of Debian is configured for apt"

mkdir -p "$(dirname "$target")"
work=$(mktemp -d "$target.XXXXXX")
trap 'rm -rf "$work"' EXIT
root=$work/apt
mkdir -p "$root"/{etc/apt.conf.d,etc/preferences.d,etc/trusted.gpg.d,state/lists/partial,cache/archives/partial,dpkg}
: > "$root/dpkg/status"
key=/usr/share/keyrings/debian-archive-keyring.gpg
echo "deb [signed-by=$key] $mirror sid main" > "$root/etc/sources.list"
# A mirror may be a snapshot whose index is older than it wishes to be; its signature is checked all the same.
proxy=$(apt-config dump Acquire | grep -i proxy || true)  # as the machine reaches its mirror
cat > "$root/apt.conf" <<END
$proxy
Dir::Etc "$root/etc";
Dir::Etc::sourcelist "$root/etc/sources.list";
Dir::Etc::sourceparts "-";
Dir::State "$root/state";
Dir::State::status "$root/dpkg/status";
Dir::Cache "$root/cache";
APT::Architecture "$(dpkg --print-architecture)";
APT::Install-Recommends "false";
APT::Sandbox::User "";
Debug::NoLocking "true";
Acquire::Check-Valid-Until "false";
END
export APT_CONFIG=$root/apt.conf
echo "fetching a MySQL server for the tests (into $target)"
apt-get update -qq || fail "the mirror's suite sid cannot be read"
apt-get install -y -qq --download-only mysql-server-core >/dev/null || fail "the packages of mysql-server-core cannot be fetched"
mkdir "$work/root"
for package in "$root"/cache/archives/*.deb; do
  dpkg-deb --fsys-tarfile "$package" | tar -x -C "$work/root" --keep-directory-symlink --no-same-owner \
    --exclude='./usr/share/doc/*' --exclude='./usr/share/man/*'
done
rm -rf "$root"
[ -x "$work/root/usr/sbin/mysqld" ] || fail "the packages hold no mysqld"
touch "$work/root/complete"
rm -rf "$target"
mv -T "$work/root" "$target" 2>/dev/null || [ -e "$target/complete" ] || fail "$target cannot be written"
