"""Traces, the Laplace approximation, and the tuning of every exit."""
