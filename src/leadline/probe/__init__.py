"""Measurements on the real device: environment, twin, sweep."""
