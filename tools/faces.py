"""Extends the reference of façades: methods that are called in threads appear as in their blocking class.

Methods that the blocking class inherits appear as its own: those by time and of groups are in files of their own.
"""

from typing import Any, Final

import griffe

FACES: Final = {"_async_relations.AsyncRelations": "_relations.Relations"}
"""The façades of `relatum_consumer`, each with its blocking class."""

CALLED: Final = "_called("
"""The start of the expression that makes a method call a thread."""


class Faces(griffe.Extension):
    """Shows these methods as async methods, with arguments and documentation."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Give the package's façades their methods."""
        for face, blocking in FACES.items() if pkg.name == "relatum_consumer" else ():
            methods = pkg[blocking].all_members
            for name, member in pkg[blocking].inherited_members.items():
                pkg[blocking].set_member(name, member.final_target)
            for name, member in pkg[face].members.items():
                if member.is_attribute and str(member.value).startswith(CALLED):
                    pkg[face].set_member(name, _awaited(methods[name]))


def _awaited(method: griffe.Function) -> griffe.Function:
    awaited = griffe.Function(
        method.name, parameters=method.parameters, returns=method.returns, docstring=method.docstring
    )
    awaited.labels.add("async")
    return awaited
