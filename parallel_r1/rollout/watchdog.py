"""An engine that hangs ends the process, with a message and a status of its own, rather than a run that stands still.

The engine runs in the trainer's process: a call that never returns can be neither interrupted nor taken over by another
thread. So the run ends, and the same command goes on from its last checkpoint.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from typing import Self

HUNG = 75
"""Exit status after a hang (EX_TEMPFAIL of sysexits.h: try again later)."""
_GRACE_S = 30.0


class Watchdog:
    """Ends the process when `beat` has not been called for `timeout_s` seconds inside its body. None: never.

    A thread watches. Where the hung call keeps Python itself from running, faulthandler's own thread, which does not
    need it, ends the process half a minute later, with status 1.
    """

    def __init__(self, what: str, timeout_s: float | None) -> None:
        self.what, self.timeout_s = what, timeout_s
        self._last = time.monotonic()
        self._armed = 0.0
        self._over = threading.Event()

    def __enter__(self) -> Self:
        if self.timeout_s is not None:
            self.beat()
            threading.Thread(target=self._watch, name="engine-watchdog", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.timeout_s is not None:
            self._over.set()
            faulthandler.cancel_dump_traceback_later()

    def beat(self) -> None:
        """There is progress."""
        self._last = time.monotonic()
        if self.timeout_s is not None and self._last - self._armed > self.timeout_s / 4:
            self._armed = self._last
            faulthandler.dump_traceback_later(self.timeout_s + _GRACE_S, exit=True, file=sys.__stderr__)

    def _watch(self) -> None:
        while not self._over.wait(min(1.0, self.timeout_s / 4)):
            if time.monotonic() - self._last > self.timeout_s:
                self._end()

    def _end(self) -> None:
        print(
            f"error: {self.what} made no progress for {self.timeout_s:g} s (engine.init_args.timeout_s): the process "
            f"ends with status {HUNG}. Run the same command again: it goes on from the last checkpoint. Where every "
            "thread stands:",
            file=sys.__stderr__,
            flush=True,
        )
        faulthandler.dump_traceback(file=sys.__stderr__, all_threads=True)
        os._exit(HUNG)
