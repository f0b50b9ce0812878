from __future__ import annotations

from support.plane_rig import close_sources

__all__ = ["close_sources"]
