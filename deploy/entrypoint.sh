#!/bin/sh
# The image's entry point. Spark asks for the name of its user, and `docker run --user` may give a number without one.
set -eu
if ! getent passwd "$(id -u)" >/dev/null; then
  NSS_WRAPPER_PASSWD=$(mktemp) && NSS_WRAPPER_GROUP=/etc/group
  echo "firnline:x:$(id -u):$(id -g):Firnline:$HOME:/bin/sh" >"$NSS_WRAPPER_PASSWD"
  export NSS_WRAPPER_PASSWD NSS_WRAPPER_GROUP LD_PRELOAD=libnss_wrapper.so
fi
exec firnline "$@"
