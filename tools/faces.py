"""What the reference shows of a façade: the methods that it calls in threads, as their blocking class has them."""

from typing import Any, Final

import griffe

FACES: Final = {"_async_relations.AsyncRelations": "_relations.Relations"}
"""Façades of `relatum_consumer`, and what they call."""

CALLED: Final = "_called("
"""How a method is said to be called in a thread."""


class Faces(griffe.Extension):
    """Shows such a method with its arguments and its documentation, to be awaited."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Replace the attributes of a package's façades by methods."""
        for face, blocking in FACES.items() if pkg.name == "relatum_consumer" else ():
            methods = pkg[blocking].all_members
            for name, member in pkg[face].members.items():
                if member.is_attribute and str(member.value).startswith(CALLED):
                    pkg[face].set_member(name, _awaited(methods[name]))


def _awaited(method: griffe.Function) -> griffe.Function:
    awaited = griffe.Function(
        method.name, parameters=method.parameters, returns=method.returns, docstring=method.docstring
    )
    awaited.labels.add("async")
    return awaited
