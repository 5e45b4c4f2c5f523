"""Benchmarks: one file an op, one for a whole drafter round. ``python -m bench.report [--quick]`` runs them all."""
