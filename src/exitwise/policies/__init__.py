"""Exit policies: thresholds for a budget, certificates, and the budget controller."""
