"""The wheel with the hot modules as mypyc compiles them: equal to their sources in all that they do."""

import os
import pickle
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.test_extract import damaged, messages
from tests.unit.test_wire_message import SAMPLE, TYPED

pytestmark = pytest.mark.release

TESTED_BY = ("delivered_messages", "extract", "spark_columns", "stamp", "wire", "wire_message")
"""Unit tests of the modules that are compiled."""


@pytest.fixture(scope="module")
def wheel(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel as a machine with a C compiler builds it."""
    directory = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", directory, pytestconfig.rootpath]
    # Not optimised, which takes the C compiler as long as everything else does.
    done = subprocess.run(command, env=os.environ | {"MYPYC_OPT_LEVEL": "0"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (built,) = directory.glob("*.whl")
    if built.name.endswith("-py3-none-any.whl"):
        pytest.skip("there is no C compiler, or there are no headers of Python")
    return built


@pytest.fixture(scope="module")
def unpacked(wheel: Path) -> Path:
    directory = wheel.parent / "unpacked"
    zipfile.ZipFile(wheel).extractall(directory)
    return directory


def _version(place: Path) -> str:
    command = [sys.executable, "-c", "from relatum_cli.start import main; main()", "--version"]
    environment = os.environ | {"PYTHONPATH": str(place)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


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
    """A good message with one byte changed, wherever it lies, or cut off there."""
    sample, place = draw(st.sampled_from([SAMPLE, TYPED])), draw(st.integers(0, 90))
    return sample[:place] + draw(
        st.just(b"") | st.binary(min_size=1, max_size=1).map(lambda byte: byte + sample[place + 1 :])
    )


@given(records=st.lists(messages | damaged() | changed() | ANY, min_size=1, max_size=40))
def test_records_decode_alike(decoders: tuple[Decoder, Decoder], records: list[bytes]) -> None:
    """Of good messages, damaged ones and any bytes, values, rows and columns are the same, and so are the errors."""
    _compare(decoders, records)


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
