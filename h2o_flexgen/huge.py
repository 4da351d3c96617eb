"""Anonymous host pages of a mapping of their own, huge where the kernel has huge pages. No torch."""

from __future__ import annotations

import logging
import mmap

log = logging.getLogger(__name__)


def huge_pages(nbytes: int) -> mmap.mmap:
    """`nbytes` (more than 0) of private memory: page-aligned, zeroed, gone with the last reference to it.

    OSError where the system has no more; where it has no huge pages to give they are small ones.
    """
    # Python's default is MAP_SHARED, which the kernel treats as shared memory and backs by small pages.
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            pages.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            log.debug("no transparent huge pages for %d bytes", nbytes)
    return pages
