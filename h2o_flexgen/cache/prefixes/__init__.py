"""Keys and values of prefixes that come back: in host memory and on disk, evicted by expected reuse."""
