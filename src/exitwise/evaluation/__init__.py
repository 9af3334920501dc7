"""Metrics, budgeted evaluation, and the tables of the paper."""
