"""Runs a command that must not outlive the service: `python -m firnline.service.leash`, with the command on its input.

The first line of the input is JSON: the command, and a descriptor that it keeps open until it ends, or null. The
service keeps the input open. Its end means that the service is gone, however it ended; then the command is killed, with
every process of its group.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading


def main() -> int:
    """Run the command; returns its exit code."""
    line = sys.stdin.buffer.readline()
    if not line:
        return 1
    given = json.loads(line)
    lock = given["lock"]
    child = subprocess.Popen(given["command"], stdin=subprocess.DEVNULL, pass_fds=() if lock is None else (lock,))

    is_over = threading.Event()

    def watch() -> None:
        os.read(sys.stdin.fileno(), 1)
        is_over.set()
        child.kill()

    threading.Thread(target=watch, name="firnline leash", daemon=True).start()
    code = child.wait()
    if is_over.is_set():
        os.killpg(os.getpgid(0), signal.SIGKILL)  # the command is gone; its JVM, and this process
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    if os.getpgid(0) != os.getpid():
        sys.exit("the leash needs a process group of its own")
    os._exit(main())
