"""Where forebay keeps what it found out once: `FOREBAY_CACHE_DIR`, or the user's cache directory."""

import os
from pathlib import Path


def cache_dir() -> Path:
    """`$FOREBAY_CACHE_DIR`, else `$XDG_CACHE_HOME/forebay`, else `~/.cache/forebay`. It need not exist."""
    if own := os.environ.get("FOREBAY_CACHE_DIR"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "forebay"
