"""Matrix products that read stored weights as they lie on disk; a kernel knows a format and no method."""
