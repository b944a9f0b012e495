"""The process of a rank above 0: `python -m ember.parallel.worker`. Messages come by stdin, answers go to stdout.

It does what rank 0 does, step by step, with its own part. Signals are for rank 0 to heed: it ends when its stdin does.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from functools import partial
from queue import SimpleQueue
from typing import Any, BinaryIO

from ember.errors import UserError
from ember.parallel.group import Group
from ember.parallel.messages import Failed, Join, Measure, Pool, Ready, Room, Step, receive, send
from ember.parallel.rank import RunnerSpec


def main() -> None:
    """Work until there are no more messages."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what anything else prints is no answer
    messages: SimpleQueue[Any] = SimpleQueue()
    threading.Thread(target=_listen, args=(sys.stdin.buffer, messages), daemon=True).start()
    spec, rank = messages.get()
    try:
        _work(spec, spec.group(rank), messages, answers)
    except Exception as error:
        traceback.print_exc()
        send(answers, Failed(str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"))
        os._exit(1)  # an orderly end would wait for the thread that listens


def _listen(pipe: BinaryIO, messages: SimpleQueue[Any]) -> None:
    """At the end of the pipe the process ends too, whatever it is waiting for; it has nothing to save."""
    try:
        while True:
            messages.put(receive(pipe))
    except EOFError:
        os._exit(0)
    except Exception:  # else the process would wait for messages that nobody reads, and rank 0 for it
        traceback.print_exc()
        os._exit(1)


def _work(spec: RunnerSpec, group: Group, messages: SimpleQueue[Any], answers: BinaryIO) -> None:
    runner = spec.load(group)
    send(answers, Ready())
    while True:
        match messages.get():
            case Join(port):
                group.join(port)
            case Measure(step, meter):
                send(answers, Room(meter.room(group.device, partial(runner.run, step.input()))))
            case Pool(num_blocks):
                runner.set_pool(num_blocks)
            case Step() as step:
                runner.run(step.input())


if __name__ == "__main__":
    main()
