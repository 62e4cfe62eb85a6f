"""Bodies as files, and images: what others wrote, given out so that no browser runs any of it."""

from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from relatum.reading import Message
from relatum_consumer.web._bodies import image_type
from relatum_consumer.web._endpoint import Export, Handler, problem_met
from relatum_consumer.web._parameters import parsed
from relatum_consumer.web._problems import Problem, Refused
from relatum_consumer.web._rendering import Rendering, StaticFile
from relatum_consumer.web._site import Site

_ALONE: Final = "sandbox; default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"
"""Also where it is opened by itself: an origin of its own, nothing is loaded or run. Styles are the browser's own."""

_MASKED: Final = Problem(403, "bodies_masked", "this body is not shown here", "Who set up the page can allow it.")
_NO_IMAGE: Final = Problem(404, "no_image", "this body is no image of a kind that is shown", "Download it instead.")


def download_of(asked: type, rendering: Rendering, *, as_image: bool) -> Handler:
    """What gives out a message's body.

    Args:
        asked: How the message is named, in the path or in the query.
        rendering: For what goes wrong.
        as_image: Whether it is shown, where it is an image; else it is a file to be kept.
    """

    async def handle(request: Request) -> Response:
        try:
            named: Any = parsed(asked, request.path_params, request.query_params.multi_items())
            message = await _read(request.app.state.site, named)
        except Exception as error:  # noqa: BLE001
            return rendering.problem(problem_met(error), request.scope)
        kind = image_type(message.body) if as_image else "application/octet-stream"
        if kind is None:
            return rendering.problem(_NO_IMAGE, request.scope)
        headers = {"Content-Security-Policy": _ALONE}
        if not as_image:
            # No part of the stream's name: it may be anything.
            headers["Content-Disposition"] = f'attachment; filename="message-{named.offset}.bin"'
        return Response(message.body, headers=headers, media_type=kind)

    return handle


async def _read(site: Site, named: Any) -> Message:
    await site.keys()
    message = await site.relations.read(named.stream, named.offset)
    if site.masking.hides_body(message):
        raise Refused(_MASKED)
    return message


def export_of(asked: type, export: Export, rendering: Rendering) -> Handler:
    """What gives out an answer as a file to be kept."""

    async def handle(request: Request) -> Response:
        try:
            given: Any = parsed(asked, request.path_params, request.query_params.multi_items())
            text = await export.text(request.app.state.site, given)
        except Exception as error:  # noqa: BLE001
            return rendering.problem(problem_met(error), request.scope)
        headers = {
            "Content-Security-Policy": _ALONE,
            "Content-Disposition": f'attachment; filename="{export.file}"',
            "Content-Type": export.media_type,
        }
        return Response(text.encode("utf-8", "replace"), headers=headers)

    return handle


def static_of(files: dict[str, StaticFile], version: str) -> Handler:
    """What gives out the page's own files; a browser keeps them, since their path changes when they do."""

    async def handle(request: Request) -> Response:
        file = files.get(request.path_params["file"])
        if file is None:
            return Response("there is no such file\n", 404, media_type="text/plain")
        is_present = request.path_params["version"] == version
        kept = "public, max-age=31536000, immutable" if is_present else "no-cache"
        return Response(file.content, headers={"Cache-Control": kept}, media_type=file.media_type)

    return handle
