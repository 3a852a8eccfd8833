"""Deterministic packs: build, verify, negative control."""
