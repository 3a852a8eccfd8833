"""Providers: where the machine comes from and how it is let go."""
