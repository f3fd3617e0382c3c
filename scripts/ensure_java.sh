#!/usr/bin/env bash
# Spark needs Java 17 or newer: use it if it is there, install it where that is allowed, else say what to type.
set -euo pipefail

version() {
  local java="${JAVA_HOME:+$JAVA_HOME/bin/}java"
  command -v "$java" >/dev/null 2>&1 || { echo 0; return; }
  "$java" -version 2>&1 | sed -n 's/.*version "\([0-9]*\).*/\1/p' | head -n 1
}

[ "$(version)" -ge 17 ] 2>/dev/null && exit 0

if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
  echo "installing Java 17 (openjdk-17-jre-headless)"
  apt-get update -qq && apt-get install -y -qq openjdk-17-jre-headless >/dev/null
elif [ "$(id -u)" = 0 ] && command -v dnf >/dev/null 2>&1; then
  echo "installing Java 17 (java-17-openjdk-headless)"
  dnf install -y -q java-17-openjdk-headless
elif command -v brew >/dev/null 2>&1; then
  echo "installing Java 17 (openjdk@17)"
  brew install --quiet openjdk@17
fi

if ! [ "$(version)" -ge 17 ] 2>/dev/null; then
  echo "Error: Firnline needs Java 17 or newer, and this account may not install it." >&2
  echo "Try: sudo apt-get install openjdk-17-jre-headless   (Debian, Ubuntu; or set JAVA_HOME)" >&2
  exit 1
fi
