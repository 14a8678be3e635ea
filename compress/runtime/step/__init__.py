"""Decode one new token a sequence without Python between the layers: blocks read, made one program, and checked."""
