"""Attach exits to any module: trace it, cut it into stages, add heads."""
