"""RabbitMQ streams and their relations in PySpark: a source and a sink, the relationship table, back-fill and joins.

Needs the extra `spark`. The package can be imported without it; its names can't.

- `register` makes `spark.read.format("rabbitmq_streams")` known, and the same for writing and streaming.
"""

import importlib
from typing import TYPE_CHECKING, Any, Final

from relatum.errors import ConfigurationError

if TYPE_CHECKING:
    from relatum_spark._broker import Broker

__all__ = ["Broker"]

_HOMES: Final = {
    "Broker": "_broker",
}
"""The module of each public name, imported when the name is first asked for: pyspark takes a second."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(f"{__name__}.{_HOMES[name]}")
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.split(".")[0] in ("pyspark", "pyarrow", "pandas", "numpy"):
            raise ConfigurationError(f"{error.name} is not installed: pip install 'relatum[spark]'") from error
        raise
    value = getattr(module, name)
    globals()[name] = value
    return value
