"""What a grading worker gives up once it is ready: network, files, processes, native code.

Two nets. The kernel's limits hold whatever runs: no file may grow, few may be open, and no process may start (but for
root, whom that limit does not bind). Python's audit hook refuses the rest, and cannot be taken back. A hook is no jail
for somebody who already executes machine code; it stops what hostile text could talk a parser's `eval` into.
"""

from __future__ import annotations

import os
import resource
import sys

OPEN_FILES = 64

_REFUSED = ("socket.", "subprocess.", "ctypes.", "urllib.", "http.", "ftplib.", "smtplib.", "shutil.", "tempfile.")
_REFUSED_EXACTLY = {
    *(f"os.{name}" for name in ("system", "exec", "fork", "forkpty", "posix_spawn", "spawn", "startfile", "kill")),
    *(
        f"os.{name}"
        for name in ("killpg", "remove", "rename", "mkdir", "rmdir", "link", "symlink", "truncate", "chdir")
    ),
    *(f"os.{name}" for name in ("chmod", "chown", "utime", "setxattr", "removexattr", "putenv", "unsetenv")),
    *("pty.spawn", "webbrowser.open", "sqlite3.connect", "mmap.__new__", "syslog.openlog", "signal.pthread_kill"),
}
_LISTS = {"os.listdir", "os.scandir"}
_WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def lock_down() -> None:
    """From here on this process computes and talks through the pipes it has; it can still import installed code."""
    sys.dont_write_bytecode = True
    for limit, most in (("RLIMIT_FSIZE", 0), ("RLIMIT_NPROC", 0), ("RLIMIT_NOFILE", OPEN_FILES)):
        if (number := getattr(resource, limit, None)) is not None:
            resource.setrlimit(number, (most, most))
    code = tuple(
        os.path.join(os.path.realpath(path), "")
        for path in {*sys.path, sys.prefix, sys.base_prefix}
        if path and os.path.realpath(path) != os.sep
    )

    def is_code(path: object) -> bool:
        if not isinstance(path, str | bytes | os.PathLike):
            return False  # an open file by its number, or nothing
        return os.path.join(os.path.realpath(os.fsdecode(path)), "").startswith(code)

    def refuse(event: str, arguments: tuple) -> None:
        if event == "open":
            path, mode, flags = arguments
            writes = (flags or 0) & _WRITE_FLAGS or (isinstance(mode, str) and set(mode) & set("wax+"))
            refused = bool(writes) or not is_code(path)
        elif event in _LISTS:
            refused = not is_code(arguments[0])
        else:
            refused = event in _REFUSED_EXACTLY or event.startswith(_REFUSED)
        if refused:
            raise PermissionError(f"a grading worker may not do this: {event}")

    sys.addaudithook(refuse)
