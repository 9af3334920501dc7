"""Add exits to any module."""
