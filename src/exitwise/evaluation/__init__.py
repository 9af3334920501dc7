"""Metrics, evaluation of policies under a budget, and the tables of the paper."""
