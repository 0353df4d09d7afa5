"""Commands of the service."""

from __future__ import annotations

from server.settings import ServerSettings


def serve(settings: ServerSettings) -> None:
    """Serves plans over REST until SIGTERM or SIGINT; logs go to standard error.

    POST /v1/plans makes a plan, /docs describes the service, /livez and /readyz report its state.

    Example:
        autoshard serve --registry registry
        curl -sH 'content-type: application/json' localhost:8000/v1/plans -d @request.json
    """
    from server.service import run_service

    run_service(settings)
