"""Benchmarks: Firnline beside what a user would pick instead, in one run, as ratios."""
