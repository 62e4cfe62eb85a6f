"""Adds compiled modules to a wheel, where HATCH_BUILD_HOOK_ENABLE_CUSTOM=1 asks for them."""

import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CompiledHook(BuildHookInterface):  # type: ignore[misc,type-arg]
    """Compiles for the interpreter that builds the wheel, which is then for that one alone."""

    def dependencies(self) -> list[str]:
        """What the build needs besides hatchling."""
        return ["mypy>=1.15", "setuptools>=65"]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, before the wheel is written."""
        sys.path.insert(0, str(Path(__file__).parent))
        from compiling import compile_into

        self._place = tempfile.TemporaryDirectory(prefix="relatum-")
        package = compile_into(Path(self._place.name))
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
        build_data["force_include"][str(package)] = package.name

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what was only made for it."""
        self._place.cleanup()
