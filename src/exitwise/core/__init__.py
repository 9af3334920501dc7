"""Errors, checks, files, costs and predictions: shared by all packages."""
