#!/usr/bin/env bash
# The tests start servers of their own: PostgreSQL, Redis, MariaDB, MySQL and a Kafka broker. Use their programs if they
# are there, install them where that is allowed, else say what to type. No server of the system is needed, started or
# touched. MySQL and PostgreSQL 17 are fetched, not installed; tests that need them are skipped where they cannot be had,
# and so are those of the dashboard, which need Chromium.
# With the argument `postgres`, only PostgreSQL is looked for.
set -euo pipefail

scripts=$(cd "$(dirname "$0")" && pwd)
kafka=${XDG_CACHE_HOME:-$HOME/.cache}/firnline-tests/kafka-4.1.0  # tests/support/kafka.py starts the broker from here

has_postgres() {
  command -v initdb >/dev/null 2>&1 || ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1
}

has_redis() {
  command -v redis-server >/dev/null 2>&1
}

has_mariadb() {
  command -v mariadb-install-db >/dev/null 2>&1 && { command -v mariadbd >/dev/null 2>&1 || [ -x /usr/sbin/mariadbd ]; }
}

has_chromium() {
  command -v chromium >/dev/null 2>&1 || command -v chromium-browser >/dev/null 2>&1 || command -v google-chrome >/dev/null 2>&1
}

has_maven() {
  command -v mvn >/dev/null 2>&1
}

has_kafka() {
  [ -e "$kafka/complete" ]
}

# install WHAT PACKAGES: with Debian's tools, without the server of its own that the package would start
install() {
  [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1 || return 0
  echo "installing $1 for the tests ($2)"
  local policy=/usr/sbin/policy-rc.d
  if [ -e "$policy" ]; then policy=; else printf '#!/bin/sh\nexit 101\n' > "$policy" && chmod +x "$policy"; fi
  export DEBIAN_FRONTEND=noninteractive
  { apt-get update -qq && apt-get install -y -qq -o Dpkg::Options::=--force-confold $2 >/dev/null; } || true
  [ -z "$policy" ] || rm -f "$policy"
}

# missing WHAT PACKAGES
missing() {
  echo "Error: the tests need $1, and this account may not install it." >&2
  echo "Try: sudo apt-get install $2   (Debian, Ubuntu; or put it on the PATH)" >&2
  exit 1
}

if ! has_postgres; then
  if [ "$(id -u)" = 0 ] && [ ! -e /etc/postgresql-common/createcluster.conf ]; then  # Debian would make a cluster
    mkdir -p /etc/postgresql-common
    echo "create_main_cluster = false" > /etc/postgresql-common/createcluster.conf
  fi
  install PostgreSQL postgresql
  has_postgres || missing "PostgreSQL's programs (initdb, postgres)" postgresql
fi
[ "${1:-}" != postgres ] || exit 0

if ! has_redis; then
  install Redis redis-server
  has_redis || missing "redis-server" redis-server
fi

if ! has_mariadb; then
  install MariaDB "mariadb-server-core mariadb-client-core"
  has_mariadb || missing "MariaDB's programs (mariadbd, mariadb-install-db)" "mariadb-server-core mariadb-client-core"
fi

if ! has_chromium; then
  install Chromium chromium
  has_chromium || echo "no Chromium: the tests of the dashboard will be skipped (sudo apt-get install chromium)" >&2
fi

bash "$scripts/fetch_mysql.sh" || echo "the tests that need MySQL will be skipped" >&2

if ! has_kafka; then
  has_maven || install Maven maven
  has_maven || missing "Maven (mvn), which fetches the Kafka broker's jars" maven
  echo "fetching the Kafka broker for the tests (into $kafka)"
  mkdir -p "$kafka"
  if ! mvn -q -B -Dstyle.color=never -f "$scripts/kafka/pom.xml" org.apache.maven.plugins:maven-dependency-plugin:2.8:copy-dependencies \
      -DincludeScope=runtime "-DoutputDirectory=$kafka"; then
    echo "Error: Maven could not fetch the jars of org.apache.kafka:kafka_2.13:4.1.0." >&2
    echo "Try: check that mvn reaches its repository, then bash scripts/ensure_servers.sh again" >&2
    exit 1
  fi
  touch "$kafka/complete"
fi

bash "$scripts/fetch_postgres.sh" || echo "the tests that need PostgreSQL 17 will be skipped" >&2
