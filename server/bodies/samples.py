"""What is told about samples that were sent to the service."""

from __future__ import annotations
