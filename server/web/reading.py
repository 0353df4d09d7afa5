"""Reading the bodies of requests, within the limits."""

from __future__ import annotations

import asyncio

from fastapi import Request

from server.problems import BodyTimeoutError, BodyTooLargeError, MediaTypeError
from server.settings import ServerSettings
from server.web.buffers import Buffer

_DISCONNECT_POLL_S = 0.25


async def read_body(
    request: Request, settings: ServerSettings, buffer: Buffer, expected: str = "application/json"
) -> bytes:
    """The body of a request, of which no more than the limit is ever held.

    Args:
        request: Of which nothing has been read.
        settings: Limits.
        buffer: Counts the bytes as they come.
        expected: Its media type.

    Raises:
        MediaTypeError: If it is declared as another one.
        BodyTooLargeError: If its length, or the length in its header, is above the limit.
        BodyTimeoutError: If it does not arrive in time.
        RetryError: If too many bytes are held already.
    """
    media_type = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if media_type != expected:
        raise MediaTypeError(f"must be {expected}, got {media_type[:100]!r}", field="content-type")
    too_large = BodyTooLargeError(f"must have at most {settings.max_body_bytes:,} bytes", field="body")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > settings.max_body_bytes:
        raise too_large
    body = bytearray()  # not a list: single bytes would take fifty times their size
    try:
        async with asyncio.timeout(settings.body_timeout_s):
            async for chunk in request.stream():
                if len(body) + len(chunk) > settings.max_body_bytes:
                    raise too_large
                buffer.receive(len(chunk))
                body += chunk
    except TimeoutError:
        raise BodyTimeoutError(f"must arrive within {settings.body_timeout_s:g} s", field="body") from None
    return bytes(body)


async def client_gone(request: Request) -> None:
    """Returns when the client has left; its body has been read."""
    while not await request.is_disconnected():
        await asyncio.sleep(_DISCONNECT_POLL_S)
