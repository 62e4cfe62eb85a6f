"""Programs forked of a process that has imported what they need: else most of a command's second goes to imports."""

import atexit
import gc
import importlib
import json
import os
import pkgutil
import select
import shlex
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, NoReturn

SERVE: Final = "import sys; from tests.support.zygote import serve; serve(*sys.argv[1:])"


def forking(call: str, *modules: str, **environment: str) -> Path:
    """A program that calls `module:name` in a fork of a process that has imported `modules`; until this one ends."""
    made = TemporaryDirectory(prefix="zygote-")
    address, program = Path(made.name, "asked"), Path(made.name, "program")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(str(address))
        listening.listen()
        number = listening.fileno()
        words = [sys.executable, "-c", SERVE, str(number), call, *modules]
        given = os.environ | environment
        process = subprocess.Popen(words, pass_fds=[number], stdin=subprocess.PIPE, env=given)
    words = [sys.executable, "-I", "-S", str(Path(__file__).with_name("zygote_client.py")), str(address)]
    program.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    program.chmod(0o700)
    atexit.register(made.cleanup)
    atexit.register(partial(process.communicate, timeout=90))
    return program


def serve(number: str, call: str, *modules: str) -> None:
    """Fork for each client, until the owner ends, and with it stdin."""
    with socket.socket(fileno=int(number)) as listening:
        for name in modules:
            imported = importlib.import_module(name.removesuffix(".*"))
            for found in pkgutil.walk_packages(imported.__path__, f"{imported.__name__}.") if name[-1] == "*" else ():
                importlib.import_module(found.name)
        function = pkgutil.resolve_name(call)
        # Otherwise the first collection in each child would copy everything.
        gc.freeze()
        while True:
            if sys.stdin in select.select([sys.stdin, listening], [], [])[0]:
                return
            asking, _ = listening.accept()
            data, numbers, *_ = socket.recv_fds(asking, 1 << 20, 4)
            # One waits for the command and reports how it ended, so that this one may fork the next.
            if data and os.fork() == 0 and _begin(asking, json.loads(data), *numbers):
                break
            for each in numbers:
                os.close(each)
            asking.close()
            with suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
    _run(function)


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
        # The client is killed where the command takes too long.
        if asked in select.select([asked, os.pidfd_open(command)], [], [])[0]:
            os.kill(command, signal.SIGKILL)
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
