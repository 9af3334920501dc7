"""The report on a run: an interactive page, and figures for papers."""
