"""What the commands that train say of the model that they made."""

from __future__ import annotations

import shlex

from autoshard import console
from costmodel.registry.promotion import Published
from costmodel.registry.publish_options import Alias


def report_published(published: Published, kind: str, name: str) -> None:
    """Prints on standard error why a version was not promoted, or not compared; nothing if all went as usual."""
    for note in published.notes:
        console.log(f"{kind} {name}: {note}")
    if published.refused:
        reasons = "; ".join(map(str, published.refused))
        command = f"autoshard models promote {published.id} --registry {shlex.quote(str(published.registry))}"
        console.log(f"{kind} {name}: {published.id} is not promoted: {reasons}. To promote it anyway: {command}")


def status_of(published: Published) -> str:
    """The version, and what became of it unless it is the production one, for titles of tables."""
    if published.id is None:
        return "not published"
    if published.alias == Alias.PRODUCTION:
        return f"version {published.id}"
    return f"version {published.id} ({published.alias or 'not promoted'})"
