"""Commands of `relatum spark`, one after the other in one process, so that they share a JVM.

Each line of the input is the JSON of a command's words; the answer is a line of its exit code, output and errors.
"""

import contextlib
import io
import json
import sys

from relatum.command import complete_app


def run(words: list[str]) -> tuple[int, str, str]:
    """Run a command as the console script does; what it ended with, printed and complained of."""
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        try:
            complete_app()(words, prog_name="relatum")
        except SystemExit as ended:
            code = ended.code
    return int(code or 0), output.getvalue(), errors.getvalue()


def main() -> None:
    """Run what is asked for until nobody asks any more."""
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
