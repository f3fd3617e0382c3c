#!/usr/bin/env bash
# The tests start a PostgreSQL server of their own: use its programs if they are there, install them where that is
# allowed, else say what to type. No server of the system is needed, started or touched.
set -euo pipefail

found() {
  command -v initdb >/dev/null 2>&1 || ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1
}

found && exit 0

if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
  echo "installing PostgreSQL for the tests (postgresql)"
  if [ ! -e /etc/postgresql-common/createcluster.conf ]; then  # Debian would make and start a server of its own
    mkdir -p /etc/postgresql-common
    echo "create_main_cluster = false" > /etc/postgresql-common/createcluster.conf
  fi
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -qq && apt-get install -y -qq -o Dpkg::Options::=--force-confold postgresql >/dev/null
fi

if ! found; then
  echo "Error: the tests need PostgreSQL's programs (initdb, postgres), and this account may not install them." >&2
  echo "Try: sudo apt-get install postgresql   (Debian, Ubuntu; or put initdb on the PATH)" >&2
  exit 1
fi
