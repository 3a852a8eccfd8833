"""Workloads: what a probe can train."""
