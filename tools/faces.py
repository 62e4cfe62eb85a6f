"""Extends the API reference: methods that a façade calls in threads appear as in the blocking class.

Methods that the blocking class inherits, such as lookups by time, appear as its own.
"""

from typing import Any, Final

import griffe

FACADES: Final = {"_async_relations.AsyncRelations": "_relations.Relations"}
"""The façades of `relatum_consumer`, each with its blocking class."""

THREAD_CALL: Final = "_called("
"""The start of the expression that defines a method by its blocking method, called in a thread."""


class Facades(griffe.Extension):
    """Shows these methods as async methods, with parameters and docstrings."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Add the methods of the package's façades."""
        for facade, blocking in FACADES.items() if pkg.name == "relatum_consumer" else ():
            methods = pkg[blocking].all_members
            for name, member in pkg[blocking].inherited_members.items():
                pkg[blocking].set_member(name, member.final_target)
            for name, member in pkg[facade].members.items():
                if member.is_attribute and str(member.value).startswith(THREAD_CALL):
                    pkg[facade].set_member(name, _awaited(methods[name]))


def _awaited(method: griffe.Function) -> griffe.Function:
    awaited = griffe.Function(
        method.name, parameters=method.parameters, returns=method.returns, docstring=method.docstring
    )
    awaited.labels.add("async")
    return awaited
