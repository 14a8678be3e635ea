"""Published ways to decode with less than the whole model that change what it writes: entered around `generate`."""
