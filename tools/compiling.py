#!/usr/bin/env python3
"""Compiles the hot modules of this checkout for the interpreter that runs this, into a directory.

Usage: tools/compiling.py [DIRECTORY]       (by default where the interpreter's packages are)

Does nothing where they are compiled. Without a compiler it says so, and all runs as it is: ends with 0 either way.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
ROOTS = [CHECKOUT / "plugin", CHECKOUT / "spark_connectors"]

MYPY = ["--config-file=", "--follow-imports=skip", "--ignore-missing-imports"]
"""What is neither compiled nor read counts as unknown: nothing compiled depends on more than the sum says."""

sys.path[:0] = map(str, ROOTS)
os.environ["RELATUM_PURE"] = "1"
from relatum import compiled  # noqa: E402


class NotCompiledError(Exception):
    """Why nothing was compiled."""


def compile_into(directory: Path) -> Path:
    """Compile into a directory; what was compiled there of other sources goes.

    Returns:
        The package that holds it.

    Raises:
        NotCompiledError: There is no compiler, or it failed.
    """
    package = directory / compiled.PACKAGE
    folder = package / compiled.sum_of_sources()
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    if (folder / (compiled.LIBRARY + suffix)).is_file():
        return package
    _check_compiler()
    with tempfile.TemporaryDirectory(prefix="relatum-") as place:
        ended = subprocess.run(  # noqa: S603 - this file
            [sys.executable, __file__, "--build", place],
            cwd=CHECKOUT,
            env=os.environ | {"MYPYPATH": os.pathsep.join(map(str, ROOTS))},
            capture_output=True,
            text=True,
            check=False,
        )
        if ended.returncode:
            raise NotCompiledError((ended.stderr.strip() or ended.stdout.strip()).splitlines()[-1])
        made = Path(place, "made")
        whole = Path(place, "whole")
        whole.mkdir()
        for source in (*compiled.COMPILED, compiled.LIBRARY):
            name = compiled.module_of(source)
            shutil.copy(made / (name.replace(".", "/") + suffix), whole / (name + suffix))
        shutil.rmtree(package, ignore_errors=True)
        package.mkdir(parents=True)
        shutil.move(whole, folder)
    return package


def _check_compiler() -> None:
    """Say early what is missing, before mypyc reads anything.

    Raises:
        NotCompiledError: There is no compiler, or there are no headers for it.
    """
    compiler = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[0]
    if shutil.which(compiler) is None:
        raise NotCompiledError(f"there is no compiler {compiler}")
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        raise NotCompiledError("Python's headers are missing (on Debian: python3-dev)")


def _build(place: Path) -> None:
    """In a process of its own: mypyc and setuptools end it where they fail."""
    from mypyc.build import mypycify  # first: setuptools brings the compiler
    from setuptools import Distribution

    paths = {source: str(_path(source)) for source in compiled.COMPILED + compiled.READ}
    extensions = mypycify(
        [*MYPY, f"--cache-dir={place / 'cache'}", *paths.values()],
        only_compile_paths=[paths[source] for source in compiled.COMPILED],
        target_dir=str(place / "c"),
        group_name="relatum",
        debug_level="0",
        opt_level=os.environ.get("MYPYC_OPT_LEVEL", "3"),
    )
    command = Distribution({"name": "relatum", "ext_modules": extensions}).get_command_obj("build_ext")
    command.build_lib, command.build_temp = str(place / "made"), str(place / "objects")
    command.ensure_finalized()
    command.run()


def _path(source: str) -> Path:
    return next(path for root in ROOTS if (path := root / source).is_file()).relative_to(CHECKOUT)


def main(arguments: list[str]) -> None:
    """Do what the usage says."""
    if arguments[:1] == ["--build"]:
        _build(Path(arguments[1]))
        return
    directory = Path(arguments[0] if arguments else sysconfig.get_path("platlib"))
    try:
        compile_into(directory)
    except NotCompiledError as why:
        print(f"Relatum runs as pure Python here, nothing is compiled: {why}", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
