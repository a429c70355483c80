"""The grading worker: a process of its own that compares answers by math-verify, one job a line.

Run by `grading` as `python -m parallel_r1.reward.worker MEMORY_BYTES`. It reads JSON lines `[seconds, gold, answers,
where]` from standard input and writes one line each, `[correct, reason]`; the first line says `ready`, or why it cannot
be. It ends when its input ends. Whatever hangs it ends it: an alarm that nothing handles is a second net below the
pool's own time limit, so that a worker whose parent has gone does not spin for ever. Once ready it has no network, no
files and no processes (see `sandbox`).
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import sys

GRACE_SECONDS = 2
RECURSION_LIMIT = 4_000


def main() -> None:
    limit = int(sys.argv[1])
    # Anything a library prints must not reach the protocol: keep the pipe under a number of its own.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    logging.disable(logging.CRITICAL)
    sys.setrecursionlimit(RECURSION_LIMIT)

    try:
        from parallel_r1.reward.answers import Extraction, judge
        from parallel_r1.reward.sandbox import lock_down
        from parallel_r1.reward.symbolic import same

        same("x+1", "1+x")  # builds the parser's tables now, outside anybody's time limit
        lock_down()
    except Exception as error:
        _say(out, [f"{type(error).__name__}: {error}"[:500]])
        return
    _say(out, ["ready"])

    for line in sys.stdin:
        seconds, gold, answers, where = json.loads(line)
        signal.alarm(int(seconds) + GRACE_SECONDS)
        try:
            verdict = judge(gold, Extraction(tuple(answers), where), same)
            reply = [verdict.correct, verdict.reason]
        except MemoryError:
            # The heap is full of what the answer left behind: say so and make room for a fresh process.
            _say(out, [False, "needs more memory than a grading worker may use"])
            return
        except Exception as error:  # model output: whatever it trips in a parser, it is a wrong answer
            reply = [False, f"cannot be compared ({type(error).__name__})"]
        signal.alarm(0)
        _say(out, reply)


def _say(out, message: list) -> None:
    out.write(json.dumps(message) + "\n")
    out.flush()


if __name__ == "__main__":
    main()
