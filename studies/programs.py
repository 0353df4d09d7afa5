"""What to type to run a study again."""

from __future__ import annotations

import shlex


def command_line(study: str, **options: object) -> str:
    """What to type to run a study with these options; those that are None are left out."""
    words = ["python", "-m", "studies", study]
    for name, value in options.items():
        if value is not None:
            words += [f"--{name.replace('_', '-')}", f"{value:g}" if isinstance(value, float) else str(value)]
    return shlex.join(words)
