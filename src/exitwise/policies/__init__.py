"""Exit thresholds for a budget, certificates, and the controller."""
