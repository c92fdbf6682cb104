"""What a worker process runs: read a request, call it, answer, until the pipe closes.

Started by `autoshard.rungs.worker` only, with: request fd, answer fd, parent pid, platform,
CPU device count, the file that its output goes to, and its niceness. Nothing may import this
module: it runs as `__main__`, and would be there twice.
"""

import os
import pickle
import sys
import threading
import time
import traceback
from typing import BinaryIO

from autoshard.compat.xla.stderr_capture import quiet

with quiet():  # what JAX's plugins write as they are imported says nothing of a program
    import jax

from autoshard.rungs.worker import process as worker
from autoshard.rungs.worker.process import LENGTH


def main(argv: list[str]) -> None:
    """Serves requests until the parent closes the pipe or is gone."""
    request_fd, answer_fd, parent, platform, device_count, path, nice = argv
    os.nice(int(nice))
    for fd in (int(request_fd), int(answer_fd)):
        os.set_inheritable(fd, False)
    threading.Thread(target=_die_with, args=(int(parent),), daemon=True).start()
    worker.log_path = path

    jax.config.update("jax_platforms", platform)
    if platform == "cpu":
        jax.config.update("jax_num_cpu_devices", int(device_count))
    with os.fdopen(int(request_fd), "rb") as requests, os.fdopen(int(answer_fd), "wb") as answers:
        _send(answers, b"")
        while header := requests.read(LENGTH.size):
            _send(answers, _answer(requests.read(*LENGTH.unpack(header))))


def _answer(request: bytes) -> bytes:
    """Pickled (True, result), or (False, text) when unpickling, the call or pickling raised."""
    try:
        function, args = pickle.loads(request)
        return pickle.dumps((True, function(*args)), protocol=5)
    except Exception as error:  # whatever it was, the parent must hear of it
        text = f"{type(error).__name__}: {error}\n{traceback.format_exc(limit=-8)}"
        return pickle.dumps((False, text), protocol=5)


def _send(answers: BinaryIO, payload: bytes) -> None:
    answers.write(LENGTH.pack(len(payload)) + payload)
    answers.flush()


def _die_with(parent: int) -> None:
    """A worker that is busy when its parent is killed must not go on for hours."""
    while os.getppid() == parent:
        time.sleep(2)
    os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
