"""The wheel with the hot modules as mypyc compiles them: equal to their sources in all that they do."""

import os
import pickle
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.test_extract import damaged, messages
from tests.unit.test_wire_message import SAMPLE, TYPED

TESTED_BY = ("delivered_messages", "extract", "spark_columns", "stamp", "wire_chunk", "wire_message")
"""Unit tests of the modules that are compiled."""


@pytest.fixture(scope="module")
def wheel(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel as a machine with a C compiler builds it."""
    directory = tmp_path_factory.mktemp("wheel")
    # Not optimised, which takes the C compiler as long as everything else does.
    _built(pytestconfig.rootpath, directory, MYPYC_OPT_LEVEL="0")
    (built,) = directory.glob("*.whl")
    if built.name.endswith("-py3-none-any.whl"):
        pytest.skip("there is no C compiler, or there are no headers of Python")
    return built


@pytest.fixture(scope="module")
def unpacked(wheel: Path) -> Path:
    """The wheel as it is installed."""
    directory = wheel.parent / "unpacked"
    zipfile.ZipFile(wheel).extractall(directory)
    return directory


def _built(checkout: Path, directory: Path, **environment: str) -> str:
    command = [sys.executable, "-m", "pip", "wheel", "--verbose", "--no-deps", "--wheel-dir", directory, checkout]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def _version(place: Path) -> str:
    """What the command says that runs from a place."""
    command = [sys.executable, "-c", "from relatum._start import main; main()", "--version"]
    environment = os.environ | {"PYTHONPATH": str(place)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


def test_each_module_that_is_named_is_there(pytestconfig: pytest.Config) -> None:
    """What the build reads and compiles is named in pyproject.toml."""
    hook = tomllib.loads((pytestconfig.rootpath / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]
    named = [*hook["wheel"]["hooks"]["custom"]["compiled"], *hook["wheel"]["hooks"]["custom"]["read"]]
    assert [name for name in named if not (pytestconfig.rootpath / name).is_file()] == []


def test_a_wheel_runs_compiled_where_it_is_installed(wheel: Path, unpacked: Path) -> None:
    """It is for this interpreter alone. In a zip, as Spark takes them, its sources run; so do those of a checkout."""
    assert f"-cp{sys.version_info[0]}{sys.version_info[1]}-" in wheel.name
    assert "(compiled)" in _version(unpacked)
    assert "(pure Python)" in _version(wheel)
    assert "(pure Python)" in _version(Path())


def test_the_tests_of_what_is_compiled_pass_with_the_wheel(unpacked: Path, pytestconfig: pytest.Config) -> None:
    """Users run it compiled, and the suite as it is."""
    files = [f"tests/unit/test_{name}.py" for name in TESTED_BY]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *files]
    environment = os.environ | {"PYTHONPATH": str(unpacked)}
    done = subprocess.run(command, env=environment, cwd=pytestconfig.rootpath, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_without_a_compiler_a_wheel_is_pure_python(pytestconfig: pytest.Config, tmp_path: Path) -> None:
    """It is built all the same, and the reason is said."""
    said = _built(pytestconfig.rootpath, tmp_path, CC="no-such-compiler")
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert "there is no compiler no-such-compiler" in said


# --- the same, compiled or not ------------------------------------------------------------------------------------


class Decoder:
    """A process that decodes.

    Attributes:
        is_compiled: Whether it runs compiled.
    """

    def __init__(self, environment: dict[str, str]) -> None:
        command = [sys.executable, "-m", "tests.support.decoding"]
        self._process = subprocess.Popen(
            command, env=os.environ | environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._process.stdout is not None
        self.is_compiled: bool = pickle.load(self._process.stdout)

    def ask(self, records: list[bytes]) -> list[str]:
        """What became of records."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        pickle.dump(records, self._process.stdin)
        self._process.stdin.flush()
        answer: list[str] = pickle.load(self._process.stdout)
        return answer

    def close(self) -> None:
        """End it."""
        self._process.communicate()


@pytest.fixture(scope="module")
def decoders(unpacked: Path, pytestconfig: pytest.Config) -> Iterator[tuple[Decoder, Decoder]]:
    """One that runs compiled, and one that runs as it is."""
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


@given(records=st.lists(messages | damaged(), min_size=1, max_size=20))
def test_messages_decode_alike(decoders: tuple[Decoder, Decoder], records: list[bytes]) -> None:
    """Of good messages and damaged ones, values, rows and columns are the same, and so are the errors."""
    _compare(decoders, records)


@given(sample=st.sampled_from([SAMPLE, TYPED]), place=st.integers(0, 90), byte=st.integers(0, 255))
def test_a_message_with_a_byte_changed_decodes_alike(
    decoders: tuple[Decoder, Decoder], sample: bytes, place: int, byte: int
) -> None:
    """Wherever it lies; and so does the message cut off there."""
    _compare(decoders, [sample[:place] + bytes([byte]) + sample[place + 1 :], sample[:place]])


@given(raw=st.binary(max_size=200))
def test_any_bytes_decode_alike(decoders: tuple[Decoder, Decoder], raw: bytes) -> None:
    """What no publisher wrote is refused by the same errors."""
    starts = (b"", b"\0St\xc1", b"\0Ss\xc0", b"\0Sr\xd1", b"\0Sw", b"\0\x80", b"\0\xa3")
    _compare(decoders, [start + raw for start in starts])


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
