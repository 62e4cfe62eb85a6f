"""Compiles the hot modules into a wheel with mypyc. Without a C compiler the wheel is pure Python."""

import os
import shutil
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

MYPY = ["--config-file=", "--follow-imports=skip", "--ignore-missing-imports"]
"""mypy's options. Other modules have no types, so the result does not depend on other installed packages."""


class CompiledHook(BuildHookInterface):  # type: ignore[misc,type-arg]
    """Compiles for the interpreter that builds the wheel; the wheel then works only with it."""

    def dependencies(self) -> list[str]:
        """Return the build's dependencies besides hatchling."""
        return ["mypy>=1.15", "setuptools>=65"]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile before the wheel is written. An editable installation is not compiled."""
        if version == "editable":
            return
        missing = _missing_tool()
        if missing:
            self.app.display_warning(f"No module is compiled, so the wheel is pure Python: {missing}")
            return
        self._directory = tempfile.TemporaryDirectory(prefix="relatum-")
        output = Path(self._directory.name, "made")
        _compile(Path(self._directory.name), output, self.config["compiled"], self.config["read"])
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
        for library in output.rglob("*" + sysconfig.get_config_var("EXT_SUFFIX")):
            build_data["force_include"][str(library)] = str(library.relative_to(output))

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the temporary files."""
        if hasattr(self, "_directory"):
            self._directory.cleanup()


def _missing_tool() -> str | None:
    """Return why mypyc cannot compile, checked before it starts; None if it can."""
    compiler = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[0]
    if shutil.which(compiler) is None:
        return f"there is no compiler {compiler}"
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        return "Python's headers are missing (on Debian: python3-dev)"
    return None


def _compile(place: Path, output: Path, compiled: list[str], read: list[str]) -> None:
    """Compile modules into one library; `read` modules only provide types and constants."""
    from mypyc.build import mypycify
    from setuptools import Distribution

    os.environ["MYPYPATH"] = "plugin:spark_connectors"
    extensions = mypycify(
        [*MYPY, f"--cache-dir={place / 'cache'}", *compiled, *read],
        only_compile_paths=compiled,
        target_dir=str(place / "c"),
        group_name="relatum",
        debug_level="0",
        opt_level=os.environ.get("MYPYC_OPT_LEVEL", "3"),
    )
    command = Distribution({"name": "relatum", "ext_modules": extensions}).get_command_obj("build_ext")
    command.build_lib, command.build_temp = str(output), str(place / "objects")
    command.ensure_finalized()
    command.run()
