"""The hot modules as mypyc compiles them: chosen by their sources alone, and equal to these in all that they do."""

import os
import pickle
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relatum.compiled import PACKAGE, sum_of_sources
from tests.unit.test_extract import damaged, messages
from tests.unit.test_wire_message import SAMPLE, TYPED

SAYS = """
from relatum.compiled import is_compiled
from relatum.limits import KEYS_MAX
from relatum.recording import Extractor
print(is_compiled(), type(Extractor.from_record).__name__, KEYS_MAX)
"""


def _said(directory: Path | None, *, roots: tuple[Path, ...] = (), **environment: str) -> str:
    """What a fresh interpreter says that runs, with a directory of compiled modules."""
    places = [*roots, *([] if directory is None else [directory]), *filter(None, sys.path)]
    environment = {"PYTHONPATH": os.pathsep.join(map(str, places)), "RELATUM_PURE": ""} | environment
    done = subprocess.run([sys.executable, "-c", SAYS], env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def directory(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where these sources lie compiled: in the environment, else they are compiled now."""
    here = Path(sysconfig.get_path("platlib"))
    if (here / PACKAGE / sum_of_sources()).is_dir():
        return here
    made = tmp_path_factory.mktemp("compiled")
    done = _compiling(pytestconfig.rootpath, made)
    if not (made / PACKAGE).is_dir():
        pytest.skip(done)
    return made


def _compiling(checkout: Path, directory: Path, **environment: str) -> str:
    command = [sys.executable, checkout / "tools/compiling.py", directory]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stderr.strip()


def test_what_is_compiled_of_these_sources_runs_unless_it_is_not_wanted(directory: Path) -> None:
    """The extractor is compiled where it is there, and as it is with `RELATUM_PURE=1`."""
    assert _said(directory) == "True method_descriptor 256"
    assert _said(directory, RELATUM_PURE="1") == "False function 256"


def test_an_edited_source_is_what_runs(directory: Path, pytestconfig: pytest.Config, tmp_path: Path) -> None:
    """One changed constant, and none of the compiled modules is used."""
    for source in ("plugin/relatum", "spark_connectors/relatum_spark"):
        shutil.copytree(pytestconfig.rootpath / source, tmp_path / Path(source).name)
    assert _said(directory, roots=(tmp_path,)) == "True method_descriptor 256"
    limits = tmp_path / "relatum/limits.py"
    limits.write_text(limits.read_text().replace("KEYS_MAX: Final = 256", "KEYS_MAX: Final = 255"))
    assert _said(directory, roots=(tmp_path,)) == "False function 255"


def test_without_a_compiler_all_runs_as_it_is(pytestconfig: pytest.Config, tmp_path: Path) -> None:
    """It is said in one line, and is no failure."""
    said = _compiling(pytestconfig.rootpath, tmp_path, CC="no-such-compiler")
    assert said == "Relatum runs as pure Python here, nothing is compiled: there is no compiler no-such-compiler"
    assert list(tmp_path.iterdir()) == []


def test_a_wheel_with_compiled_modules_is_built_where_that_is_asked_for(
    directory: Path, pytestconfig: pytest.Config, tmp_path: Path
) -> None:
    """It is for this interpreter alone, and runs compiled from where it is unpacked."""
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", tmp_path]
    # Not optimised, which takes the C compiler as long as everything else does.
    environment = os.environ | {"HATCH_BUILD_HOOK_ENABLE_CUSTOM": "1", "MYPYC_OPT_LEVEL": "0"}
    done = subprocess.run([*pip, pytestconfig.rootpath], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert f"-cp{sys.version_info[0]}{sys.version_info[1]}-" in wheel.name
    unpacked = tmp_path / "unpacked"
    zipfile.ZipFile(wheel).extractall(unpacked)
    assert _said(None, roots=(unpacked,)) == "True method_descriptor 256"
    assert _said(None, roots=(wheel,)) == "False function 256", "a zip has them as they are"


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
def decoders(directory: Path, pytestconfig: pytest.Config) -> Iterator[tuple[Decoder, Decoder]]:
    """One that runs compiled, and one that runs as it is."""
    path = os.pathsep.join(map(str, [directory, pytestconfig.rootpath, *filter(None, sys.path)]))
    both = tuple(Decoder({"PYTHONPATH": path, "RELATUM_PURE": pure}) for pure in ("", "1"))
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
