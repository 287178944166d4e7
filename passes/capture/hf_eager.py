"""Making Hugging Face models take their eager path while they are traced.

Their code asks one question about our tensors, "is this fake?", and avoids reads on the host if so.
Shadows answer such reads, so the truthful path of an eager run is the one to record.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

PROBE = "is_fake_tensor"


@contextmanager
def eager_path() -> Iterator[None]:
    """Let that question be answered with no; nothing happens without transformers."""
    try:
        from transformers.utils import import_utils
    except ImportError:
        yield
        return
    probe = getattr(import_utils, PROBE, None)
    if probe is None:
        yield
        return

    def never(tensor: Any) -> bool:
        return False

    setattr(import_utils, PROBE, never)
    try:
        yield
    finally:
        setattr(import_utils, PROBE, probe)
