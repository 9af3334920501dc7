"""The report: what a run's net knows, on one page and as figures."""
