"""How packed weights run: modules, CPU fast paths, and loading through transformers. Knows formats, no method."""
