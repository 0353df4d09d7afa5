"""Reading the bodies of requests, within the limits."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable, Coroutine
from itertools import chain
from typing import Annotated, Any, Generic, TypeVar

from fastapi import Header, Request, Response
from fastapi.dependencies.models import Dependant
from fastapi.params import Body
from fastapi.routing import APIRoute
from fastapi.utils import create_model_field
from pydantic import BaseModel, WithJsonSchema
from starlette.concurrency import iterate_in_threadpool, run_in_threadpool
from starlette.responses import StreamingResponse
from typing_extensions import override

from autoshard.api import RequestBody
from autoshard.core.errors import FormatError
from autoshard.formats import parse_json
from server.problems import BodyTimeoutError, BodyTooLargeError, MediaTypeError
from server.settings import ServerSettings
from server.tasks import work

B = TypeVar("B", bound=RequestBody)

_DISCONNECT_POLL_S = 0.25
#: Longest text that this process parses: Python's parser keeps all its threads waiting for as long as an object or a
#: list is, here up to 8 ms (a core of an EPYC, November 2026), and half a second for 4 MB.
MAX_PARSED_BYTES = 32 << 10

#: The header of requests that a client may send twice and that are to be done once.
IDEMPOTENCY_KEY, KEY_PATTERN = "Idempotency-Key", "^[!-~]{1,128}$"
_Key = Annotated[
    str | None,
    Header(
        alias=IDEMPOTENCY_KEY,
        description="Chosen by the client. A request with a key of the last day is answered as the one before.",
    ),
    WithJsonSchema({"type": "string", "pattern": KEY_PATTERN}),
]


class ReceivedBody(Generic[B]):
    """The JSON body of a request, of which nothing has been read.

    Args:
        request: The request.
        model: What the body has to be.
        idempotency_key: The request's key, if it has one.
    """

    def __init__(self, request: Request, model: type[B], idempotency_key: str | None = None) -> None:
        self.request = request
        self.idempotency_key = idempotency_key
        self._model = model

    async def read(self, settings: ServerSettings) -> work.Body:
        """The body, within the limits of its model and of the service; errors as of `read_body`."""
        return work.Body(await read_body(self.request, settings, self._model.max_bytes))

    async def parse(self, body: work.Body) -> B:
        """A body of at most `MAX_PARSED_BYTES` as its model, read in a thread. Planning processes read longer ones.

        Raises:
            FormatError: If it is not JSON, or a field is missing, unknown or of the wrong kind.
        """
        return await run_in_threadpool(lambda: self._model.parse(parse_json(body.text)))


class JsonBody(Generic[B]):
    """Dependency of a handler that takes a JSON body; a `BodyRoute` describes the body by the model.

    Handlers read the body themselves, when they have found room for the request. FastAPI would parse it, of any length,
    between the turns of all other requests.

    Args:
        model: What the body has to be.
    """

    def __init__(self, model: type[B]) -> None:
        self.model = model

    async def __call__(self, request: Request, idempotency_key: _Key = None) -> ReceivedBody[B]:
        """The body, unread."""
        return ReceivedBody(request, self.model, idempotency_key)


class SecretBody(JsonBody[B]):
    """As `JsonBody`, of requests whose answers are not kept (secrets, or nothing): they have no idempotency key."""

    async def __call__(self, request: Request) -> ReceivedBody[B]:  # type: ignore[override]
        """The body, unread."""
        return ReceivedBody(request, self.model)


class BodyRoute(APIRoute):
    """A route whose description has the body of its handler's `JsonBody`, and that refuses other parameters.

    The answer to HEAD is that to GET, whose body uvicorn does not send.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        for dependency in self.dependant.dependencies:
            if isinstance(dependency.call, JsonBody):
                model = dependency.call.model
                self.body_field = create_model_field("body", model, field_info=Body(annotation=model))

    @override
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        answer, known = super().get_route_handler(), _query_names(self.dependant)

        async def handle(request: Request) -> Response:
            unknown = next((name for name in request.query_params if name not in known), None)
            if unknown is not None and self.include_in_schema:
                takes = ", ".join(known) or "no parameters"
                raise FormatError(f"is unknown; this takes: {takes}", field=unknown[:100])
            response = await answer(request)
            if request.method == "HEAD" and isinstance(response, StreamingResponse):
                response.body_iterator = iterate_in_threadpool(())  # nobody reads what it would send for minutes
            return response

        return handle


def _query_names(dependant: Dependant) -> list[str]:
    """Parameters of a route's query, those of models among them."""
    names: list[str] = []
    for one in chain.from_iterable(part.query_params for part in (dependant, *dependant.dependencies)):
        model = one.field_info.annotation
        names += model.model_fields if isinstance(model, type) and issubclass(model, BaseModel) else [one.alias]
    return names


async def read_body(
    request: Request, settings: ServerSettings, max_bytes: int, expected: str = "application/json"
) -> bytes:
    """The body of a request, of which no more than the limit is ever held.

    Args:
        request: Of which nothing has been read.
        settings: Limits.
        max_bytes: Most bytes that it may have, if the settings do not say fewer.
        expected: Its media type.

    Raises:
        MediaTypeError: If it is declared as another one, or as compressed.
        BodyTooLargeError: If its length, or the length in its header, is above the limit.
        BodyTimeoutError: If it does not arrive in time.
        RetryError: If too many bytes are held already.
    """
    media_type = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if media_type != expected:
        raise MediaTypeError(f"must be {expected}, got {media_type[:100]!r}", field="content-type")
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise MediaTypeError(f"must be identity, got {encoding[:100]!r}", field="content-encoding")
    most, buffer = min(max_bytes, settings.max_body_bytes), request.state.buffer
    too_large = BodyTooLargeError(f"must have at most {most:,} bytes", field="body")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > most:
        raise too_large
    body = io.BytesIO()  # not a list: single bytes would take fifty times their size
    try:
        async with asyncio.timeout(settings.body_timeout_s):
            async for chunk in request.stream():
                if body.tell() + len(chunk) > most:
                    raise too_large
                buffer.receive(len(chunk))
                body.write(chunk)
    except TimeoutError:
        raise BodyTimeoutError(f"must arrive within {settings.body_timeout_s:g} s", field="body") from None
    return body.getvalue()


async def client_gone(request: Request) -> None:
    """Returns when the client has left; its body has been read."""
    while not await request.is_disconnected():
        await asyncio.sleep(_DISCONNECT_POLL_S)
