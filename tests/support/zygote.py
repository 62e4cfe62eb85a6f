"""Commands forked of a process that has imported what they need: else most of each command's second goes to imports."""

import atexit
import gc
import importlib
import json
import os
import pkgutil
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Final, NoReturn

SERVE: Final = "import sys; from tests.support.zygote import serve; serve(*map(int, sys.argv[1:]))"


class Zygote:
    """A process that forks others, to be shared by threads: it imports `modules`; children call `module:name`."""

    def __init__(self, modules: Sequence[str], call: str, *, address: Path | None = None) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ExitStack() as passed:
            asked = [passed.enter_context(theirs)]
            if address is not None:
                asked.append(passed.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)))
                asked[-1].bind(str(address))
                asked[-1].listen()
            numbers = [each.fileno() for each in asked]
            words = [sys.executable, "-c", SERVE, *map(str, numbers)]
            self._process = subprocess.Popen(words, pass_fds=numbers, stdin=subprocess.DEVNULL)
        self._asking, self._lock = ours, threading.Lock()
        self._asking.send(json.dumps({"modules": list(modules), "call": call}).encode())

    def run(self, arguments: Sequence[str], *, environment: Any, timeout_s: float) -> subprocess.CompletedProcess[str]:
        """Run a command to its end, as `subprocess.run` does with text that is captured."""
        asked = {"arguments": list(map(str, arguments)), "environment": dict(environment), "directory": str(Path.cwd())}
        ended, child_ended = os.pipe()
        with TemporaryFile("w+", newline="") as out, TemporaryFile("w+", newline="") as errors:
            with self._lock:
                numbers = [child_ended, out.fileno(), errors.fileno()]
                socket.send_fds(self._asking, [json.dumps(asked).encode()], numbers)
                pid = int(self._asking.recv(64))
            os.close(child_ended)
            in_time, _, _ = select.select([ended], [], [], timeout_s)
            if not in_time:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            with os.fdopen(ended) as waiting:
                code = waiting.read()
            for each in (out, errors):
                each.seek(0)
            found = (out.read(), errors.read())
        if not in_time:
            raise subprocess.TimeoutExpired(list(arguments), timeout_s, *found)
        return subprocess.CompletedProcess(list(arguments), int(code), *found)

    def close(self) -> None:
        self._asking.close()
        self._process.wait(90)


def serve(owner: int, *others: int) -> None:
    """Fork for each request of the owner, and of clients of the other sockets, until the owner ends."""
    with ExitStack() as until_asked:
        asked, *listening = (until_asked.enter_context(socket.socket(fileno=number)) for number in (owner, *others))
        told = json.loads(asked.recv(1 << 20))
        for name in told["modules"]:
            imported = importlib.import_module(name.removesuffix(".*"))
            for found in pkgutil.walk_packages(imported.__path__, f"{imported.__name__}.") if name[-1] == "*" else ():
                importlib.import_module(found.name)
        module, _, name = told["call"].partition(":")
        call = getattr(importlib.import_module(module), name)
        # Otherwise the first collection in each child would copy everything.
        gc.freeze()
        while True:
            ready, _, _ = select.select([asked, *listening], [], [])
            asking = asked if asked in ready else ready[0].accept()[0]
            data, numbers, *_ = socket.recv_fds(asking, 1 << 20, 4)
            if asking is asked and not data:
                return
            # One waits for the command and reports how it ended, so that this one may fork the next.
            if data and os.fork() == 0 and _begin(asking, json.loads(data), *numbers):
                break
            for each in numbers:
                os.close(each)
            if asking is not asked:
                asking.close()
            with suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
    _run(call)


def _run(call: Callable[[], object]) -> NoReturn:
    """Call it, and end as a program does, but for taking all modules apart, which takes as long as importing them."""
    code: object = 1
    try:
        code = call()
    except SystemExit as ended:
        code = ended.code
    except BaseException:
        traceback.print_exc()
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    if isinstance(code, str):
        print(code, file=sys.stderr)
    for each in (sys.stdout, sys.stderr):
        each.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def _begin(asked: socket.socket, told: Any, ended: int, *standard: int) -> bool:
    """True in the process that is to be the command; the one that waits for it never returns."""
    command = os.fork()
    if command:
        asked.send(b"%d" % command)
        for each in standard:
            os.close(each)
        code = os.waitstatus_to_exitcode(os.waitpid(command, 0)[1])
        os.write(ended, b"%d" % code)
        os._exit(0)
    asked.close()
    os.close(ended)
    for place, number in zip((1, 2, 0), standard, strict=False):
        os.dup2(number, place)
        os.close(number)
    os.chdir(told["directory"])
    os.environ.clear()
    os.environ.update(told["environment"])
    sys.argv = told["arguments"]
    return True
